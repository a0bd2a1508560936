"""Studies of many texts in `saccade look`: heads over a corpus, relations, antecedents, probes."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .._errors import UserError, require
from .._options import option
from ._existing import existing, existing_model
from ._outputs import result_console

if TYPE_CHECKING:
    from ...see.inspection import TextModel
    from ...support._terminal._console import Console


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """Studies of many texts"""

    corpus: list[Path] | None = option(
        None,
        "Score every head on text files, or on folders of .txt files.",
        metavar="FILES",
        callback=existing("text files, or folders of .txt files"),
    )
    against: str | None = option(
        None,
        "With --corpus: a second checkpoint; show how its heads differ from those of --model.",
        metavar="DIR_OR_HUB_ID",
        callback=existing_model(),
    )
    syntax: Path | None = option(
        None,
        "Compare heads with the syntactic relations of a CoNLL-U treebank.",
        metavar="FILE",
        callback=existing("a .conllu file", kind="file"),
    )
    coreference: Path | None = option(
        None,
        "Compare heads with coreference antecedents: JSON lines, or CoNLL-U of CorefUD.",
        metavar="FILE",
        callback=existing("a .jsonl or .conllu file", kind="file"),
    )
    probe: Path | None = option(
        None,
        "Train a probe on each layer. The file has a word, a tab and a label per line, or is a .conllu.",
        metavar="LABELS",
        callback=existing("a file with a word, a tab and a label per line, or a .conllu file", kind="file"),
    )
    column: str = option("upos", "The column of a .conllu that the probe predicts: upos or deprel.")
    texts: int = option(64, "Maximum number of passages, spread evenly over the corpus.")
    tokens: int = option(256, "Maximum tokens of a passage.")
    words: int = option(10_000, "Maximum number of words for a probe.")
    seed: int = option(0, "Seed of random repeats, splits and intervals.")

    @property
    def asked(self) -> bool:
        """Whether any of these options was given."""
        return self != CorpusOptions()


def study(
    options: CorpusOptions,
    model: str | None,
    *,
    text: list[str] | None,
    out: Path | None,
    force: bool,
    as_numbers: bool,
) -> None:
    """Run the requested studies, print tables (or JSON), and write the numbers to `out`."""
    files = _checked(options, text)
    target = _target(out, force=force)
    from ...see.inspection import open_model

    subject = open_model(model)
    results = dict(_studies(options, subject, files, quiet=as_numbers))
    if target is not None:
        _write(target, results)
    if as_numbers:
        typer.echo(json.dumps(_numbers(results), separators=(",", ":"), allow_nan=False))
    else:
        _print(results, out)


def _checked(options: CorpusOptions, text: list[str] | None) -> list[Path]:
    """The files of the corpus; errors that can be found early are raised before any work."""
    if text and not options.corpus:
        raise UserError(f"a study reads files, not a TEXT; {text[0]!r} came: --corpus {text[0]}")
    if not (options.corpus or options.syntax or options.coreference or options.probe or options.against):
        raise UserError("nothing to study came; name it with --corpus, --syntax, --coreference or --probe")
    if options.against is not None and not options.corpus:
        raise UserError("--against compares two checkpoints over texts; name them with --corpus")
    for name in ("texts", "tokens", "words"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: at least 1 is needed")
    files = [*(options.corpus or ()), *map(Path, text or ())]  # the shell makes several words of *.txt
    for path in files:
        if not path.exists():
            raise UserError(f"{path}: no such file")
    if options.syntax or any(p and p.suffix in (".conllu", ".conll") for p in (options.coreference, options.probe)):
        require("conllu", "study")
    if options.probe:
        require("sklearn", "study")
    return files


def _target(out: Path | None, *, force: bool) -> Path | None:
    if out is None:
        return None
    if out.suffix.lower() not in (".csv", ".json"):
        raise UserError(f"--out {out}: the numbers of a study are written to a .csv or a .json")
    from ...see.viewer import check_target

    return check_target(out, force=force)


def _studies(options: CorpusOptions, model: TextModel, files: list[Path], *, quiet: bool) -> Any:
    """(name, study), one after the other."""
    from ...see import analysis
    from ...see.analysis.tables import shown_progress

    if files:
        yield from _corpus(options, model, files, quiet=quiet)
    if options.syntax:
        sentences = analysis.read_treebank(options.syntax)
        with shown_progress("sentences", quiet=quiet) as progress:
            yield "syntax", analysis.study_syntax(model, sentences, source=str(options.syntax), progress=progress)
    if options.coreference:
        documents = analysis.read_coreference(options.coreference)
        with shown_progress("documents", quiet=quiet) as progress:
            source = str(options.coreference)
            yield "coreference", analysis.study_coreference(model, documents, source=source, progress=progress)
    if options.probe:
        labelled = analysis.read_labels(options.probe, options.column)
        with shown_progress("sentences and probes", quiet=quiet) as progress:
            yield (
                "probe",
                analysis.study_probe(
                    model, labelled, seed=options.seed, most=options.words, source=str(options.probe), progress=progress
                ),
            )


def _corpus(options: CorpusOptions, model: TextModel, files: list[Path], *, quiet: bool) -> Any:
    from ...see.analysis import compare, cut, read_files, study_corpus
    from ...see.analysis.tables import shown_progress
    from ...see.inspection import open_model

    documents = read_files(files)
    other = None if options.against is None else open_model(options.against)
    models = [model] if other is None else [model, other]
    texts = cut(documents, models, tokens=options.tokens, most=options.texts)
    scores = []
    for each in models:
        with shown_progress(f"texts, {each.name}", quiet=quiet) as progress:
            scores.append(study_corpus(each, texts, seed=options.seed, progress=progress))
    yield "corpus", scores[0]
    if other is not None:
        yield "against", scores[1]
        yield "comparison", compare(*scores)


def _numbers(report: dict[str, Any]) -> dict[str, Any]:
    from ...see.analysis import as_numbers

    return {"format": 1, **{name: as_numbers(each) for name, each in report.items()}}


def _write(target: Path, report: dict[str, Any]) -> None:
    from ...see.analysis import COLUMNS, as_rows
    from ...see.viewer import write_whole

    if target.suffix.lower() == ".json":
        write_whole(target, (json.dumps(_numbers(report), indent=1, allow_nan=False) + "\n").encode())
        return
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, each in report.items():
        if name != "comparison":  # the differences of what the other two hold
            writer.writerows(as_rows(each))
    write_whole(target, lines.getvalue().encode())


def _print(report: dict[str, Any], out: Path | None) -> None:
    from ...see.analysis import tables

    console = result_console()
    printers: dict[str, Callable[[Console, Any], None]] = {
        "corpus": tables.print_corpus,
        "against": tables.print_corpus,
        "comparison": tables.print_comparison,
        "syntax": tables.print_syntax,
        "coreference": tables.print_coreference,
        "probe": tables.print_probe,
    }
    for number, (name, each) in enumerate(report.items()):
        if number:
            console.print()
        printers[name](console, each)
    if out is not None:
        console.print(f"\nNumbers  {out}", soft_wrap=True)
