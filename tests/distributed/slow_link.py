"""A slow link between two network namespaces: frames wait in this process, which holds them back and counts bytes.

As `tc netem` would, which kernels do not always have. Needs Linux, root and `ip`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

ADDRESSES = ("10.213.77.1", "10.213.77.2")
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15  # frames with what is left to the card: checksums and segmentation


@contextmanager
def slow_link(delay: float, rate: float):
    """Names of two namespaces, each with its address of `ADDRESSES`. OSError where there can be none.

    Args:
        delay: seconds of a frame, one way.
        rate: bytes per second, one way.
    """
    # Names of their own: a link goes some time after its namespace.
    spaces = ends = tuple(f"saccade{os.getpid()}{side}" for side in "ab")
    relay = None
    try:
        for space, end, address in zip(spaces, ends, ADDRESSES, strict=True):
            _ip("netns", "add", space)
            _ip("link", "add", end, "type", "veth", "peer", "name", "link0", "netns", space)
            _ip("link", "set", end, "up")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "link0")
            _ip("-n", space, "link", "set", "link0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        relay = _Relay([_packets(end) for end in ends], delay, rate)
        yield spaces
    finally:
        if relay is not None:
            relay.stop()
        for space in spaces:  # its link goes with it
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None


def _packets(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    end.bind((interface, 0))
    return end


class _Relay:
    def __init__(self, ends: list[socket.socket], delay: float, rate: float) -> None:
        self.ends, self.delay, self.rate, self.stopped = ends, delay, rate, False
        self.bytes = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        waiting, free, count = [], [0.0, 0.0], itertools.count()
        while not self.stopped:
            soon = min(0.05, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.05
            for end in select.select(self.ends, [], [], soon)[0]:
                frame, address = end.recvfrom(1 << 17)
                if address[2] == socket.PACKET_OUTGOING:
                    continue
                way = self.ends.index(end)
                free[way] = max(free[way], time.monotonic()) + len(frame) / self.rate
                heapq.heappush(waiting, (free[way] + self.delay, next(count), 1 - way, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(waiting)
                with suppress(OSError):  # the sender sends it again
                    self.ends[to].send(frame)

    def stop(self) -> None:
        self.stopped = True
        self.thread.join()
        for end in self.ends:
            end.close()
