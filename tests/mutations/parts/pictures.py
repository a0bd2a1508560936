"""Faults in what pictures are made of: pooled weights, maps, and the viewer's server."""

from __future__ import annotations

from ..fault import Fault

POOLED, KERNEL = "src/saccade/_pooled.py", "native/pooled.h"
HEAD, OVERVIEW, SIDE = (f"src/saccade/viewer/maps/_{name}.py" for name in ("head", "overview", "side"))
APP = "src/saccade/viewer/server/_app.py"
POOLS, MAPS, SERVER = "tests/operator/test_pooled.py", "tests/viewer/test_maps.py", "tests/viewer/test_app.py"

FAULTS = (
    Fault(
        "pooled-hidden",
        POOLED,
        'largest = torch.where(seen, values, float("-inf")).amax((1, 3))',
        "largest = values.amax((1, 3))",
        (POOLS,),
        "Hidden pairs count as weights of 0 in the largest of a bin.",
    ),
    Fault(
        "pooled-sink",
        POOLED,
        "lse = sink_lse(found, None if call.sink is None else call.sink[head : head + 1])[0, 0]",
        "lse = found[0, 0]",
        (POOLS,),
        "The sink has no share where the lse is computed for chosen rows.",
    ),
    Fault(
        "pooled-kernel-rows",
        KERNEL,
        "const int64_t row = f.row_start + at;",
        "const int64_t row = at;",
        (POOLS,),
        "Blocks of rows straddle those of the mask's list.",
    ),
    Fault(
        "pooled-kernel-lanes",
        KERNEL,
        "(n * cells + m / share) * lanes + m % share * width;",
        "(n * cells + m / share) * lanes;",
        (POOLS,),
        "Bins narrower than a vector all hold the first lane's sum.",
    ),
    Fault(
        "mean-of-visible",
        HEAD,
        "for part in (found.sums, found.counts)",
        "for part in (found.sums, torch.full_like(found.counts, 4.0))",
        (MAPS,),
        "The mean of a coarse bin counts hidden pairs.",
    ),
    Fault(
        "sampled-row",
        HEAD,
        "chosen = starts + torch.clamp(rows.stop - starts, max=size) // 2\n        return MapTile(",
        "chosen = starts + size // 2\n        return MapTile(",
        (MAPS,),
        "The last bin's row lies outside of the map.",
    ),
    Fault(
        "thumbnail-bins",
        OVERVIEW,
        "rows * down // head.length_q",
        "rows % down",
        (MAPS,),
        "Small maps are folded.",
    ),
    Fault(
        "generated-from",
        "src/saccade/viewer/maps/_reading.py",
        "generated = len(reader.before) + sum(",
        "generated = sum(",
        (MAPS,),
        "The step of generated tokens does not count the special tokens before the text.",
    ),
    Fault(
        "origin-of-a-page",
        APP,
        'if any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin")):',
        'if False and any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin")):',
        (SERVER,),
        "A stranger's page may ask the viewer.",
    ),
    Fault(
        "token-of-operations",
        APP,
        'if not allowed(request.headers.get("x-saccade-token")):',
        'if not request.headers.get("x-saccade-token"):',
        (SERVER,),
        "Any token opens the numbers.",
    ),
    Fault(
        "file-of-the-address",
        "src/saccade/viewer/server/_address_file.py",
        "os.O_EXCL, 0o600",
        "os.O_EXCL, 0o644",
        ("tests/viewer/test_serve.py",),
        "Another user reads the token from the file that sends the browser on.",
    ),
    Fault(
        "threads-of-walks",
        "src/saccade/viewer/server/_workers.py",
        'return "part" if fine or params.get("exact") is False else "walk"',
        'return "part"',
        (SERVER,),
        "Coarse tiles of a long text hold up everything else.",
    ),
    Fault(
        "names-of-files",
        "src/saccade/viewer/maps/_budget.py",
        "if self._named is None:\n                path.unlink()",
        "if False:\n                path.unlink()",
        (MAPS,),
        "A process that is killed leaves its files on the disk.",
    ),
    Fault(
        "steps-of-another-thread",
        "src/saccade/inspection/_steps/_inputs.py",
        "if threading.get_ident() == thread:",
        "if True:",
        ("tests/viewer/test_session.py",),
        "Steps take numbers of what another thread does with the model.",
    ),
    Fault(
        "host-of-a-request",
        APP,
        "return name in self._names or (self.bound.is_unspecified and _is_address(name))",
        "return True",
        (SERVER,),
        "A stranger's name for this machine's address is taken for the server's own.",
    ),
)
