"""`saccade doctor`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..support._tables import Table
from ._options import GroupedCommand


def register(app: typer.Typer) -> None:
    app.command("doctor", cls=GroupedCommand, short_help="Check the installation, for a bug report.")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check the installation: versions, native kernels, threads, devices, and what each extra lacks.

    A bug report needs this output. The exit status is 1 if something is broken; a missing extra or an installation
    without native kernels is not.
    """
    from ._parts._installation import describe

    report = describe()
    typer.echo(json.dumps(report, indent=2) if as_json else as_text(report))
    if report["broken"]:
        raise typer.Exit(1)


def as_text(report: dict[str, Any]) -> str:
    """The report as text, one fact on each line."""
    versions = (f"{name} {version or 'missing'}" for name, version in report["packages"].items())
    variables = (f"{name}={value}" for name, value in report["environment"].items() if value is not None)
    rows = [
        ("saccade", f"{report['saccade']}  {report['folder']}"),
        ("python", f"{report['python']}  {report['system']}"),
        ("processor", f"{report['processor']}, {report['processors']} logical"),
        ("packages", ", ".join(versions)),
        ("kernels", _kernels(report["kernels"])),
        ("threads", "unknown" if report["threads"] is None else str(report["threads"])),
        ("environment", ", ".join(variables) or "no relevant variable is set"),
        ("devices", ", ".join(report["devices"] or []) or "CPU only"),
        ("model", "embedded model installed" if report["embedded_model"] else "no embedded model"),
    ]
    rows += _extras(report["extras"])
    rows += [("broken", line) for line in report["broken"]] or [("result", "no problem found")]
    return str(Table((), rows, "l"))


def _kernels(kernels: dict[str, Any] | None) -> str:
    if kernels is None:
        return "unknown"
    if not kernels["present"]:
        return f"none: {kernels['why_not']}"
    listed = f"this processor supports {', '.join(kernels['available'])}; compiled: {', '.join(kernels['compiled'])}"
    error = "" if kernels["error"] is None else f"largest error {kernels['error']:.1e} against the reference; "
    return f"{kernels['in_use'] or 'not usable'}; {error}{listed}"


def _extras(extras: dict[str, Any] | None) -> list[tuple[str, str]]:
    if extras is None:
        return [("extras", "unknown: Saccade is not installed; it runs from its source folder")]
    complete = [name for name, extra in extras.items() if not extra["missing"]]
    rows = [("extras", f"complete: {', '.join(complete) or 'none'}")]
    for name, extra in extras.items():
        if extra["missing"]:
            rows.append((f"[{name}]", f"missing {', '.join(extra['missing'])}; {extra['command']}"))
    return rows
