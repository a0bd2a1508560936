"""On which types of transformers the tools that explain a model work: one tiny random model of each type.

    python tests/attribution/reach.py [TYPE ...] [--page FILE]

Each tool is held to what it must satisfy. Contributions sum to the model's logit, and shares of a pair to its logit
(`attribute`, `why_attends` check it); the importance of a head by ablation is what `intervene` measures; a pruned model
gives what the whole one gives without those heads; effects of patched heads, and through a receiver, are finite and not
all 0. Steps are computed again from the modules that were found. Of an encoder-decoder both sides run, with heads of
the encoder, of the decoder and of cross-attention; `why_attends` and steps are those of its encoder. `--page` writes
the table; all types take 20 minutes.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "verification"))
import zoo

import saccade
from saccade.intervention import Ablate
from saccade.see.inspection._steps._found import of_module
from saccade.see.inspection._transformers import calls_told_to

IDS = torch.tensor([[3, 11, 47, 7, 5, 13, 29, 17, 71, 23, 41]])
OTHER = torch.tensor([[3, 11, 43, 7, 5, 13, 31, 17, 71, 23, 41]])
POSITION, TARGET, AGAINST, QUERY, KEY = 8, 5, 17, 8, 3
WORKS, PAGE = "works", "docs/explained-models.md"
IN_SINGLE = ("Double", "dtype", "overflow")  # in errors of models that do not run in float64
DIFFERS = {  # in errors, from type to type
    r"^\w+( has no attention .* modules).*": r"it\1",
    r"\. Not reached: .*|; it ends at .*": "",
    r"attention call \d+": "an attention call",
    r"^a run that records its operations failed, \w+: (intervene: )?": "",
    r"a torch\.\w+ tensor \([\d, ]+\)": "a tensor",
    r"\w+(\.\w+){2,}": "X",
    r"\[[-\d, ]+[])]": "[...]",
    r"'\w+Config' object": "its configuration",
}
HEADER = """# Which models explain themselves

For people who study a model of transformers: the types on which the tools work. Each type that transformers can make
here is one tiny random model, which reads token ids; an encoder-decoder reads those of its decoder too. `attribute`
splits the logits of its decoder, `why_attends` and `step` read its encoder.
`python tests/attribution/reach.py --page {page}` writes this page.

{counts}

What does not work, by reason. X is a part of the model, N a number:

| reason | tools and types |
|---|---|
{rows}
"""


def attribute(model: Any) -> None:
    text = inputs(model, IDS) if model.config.is_encoder_decoder else IDS
    found = saccade.attribute(model, text, TARGET, against=AGAINST, position=POSITION)
    assert found.sources.any(), "no head reads anything"
    assert found.cross_sources.any() or not found.cross_heads, "no head of cross-attention reads anything"
    assert found.of("token") != 0, "the token's own share is 0"


def why(model: Any) -> None:
    found = saccade.why_attends(model, IDS, QUERY, KEY)
    assert found.matrix.any(), "all shares are 0"
    size = float(found.matrix.abs().sum())
    assert abs(found.remainder) < 1e-3 * size, f"the logit is {found.logit:.3g}, the sum {found.total:.3g}"


def importance(model: Any) -> None:
    found = saccade.head_importance(model, [IDS], size, by="ablation")
    names = [call.name for call in found.values.calls]
    for call in chosen(
        model, [call for call in found.values.calls if sum(n.startswith(call.name) for n in names) == 1]
    ):
        with torch.no_grad():
            before = size(model, IDS)
            with saccade.intervene(model, {call.name: Ablate([1])}):
                rise = float(size(model, IDS) - before)
        own = float(found.values.values[found.values.heads.index((*call[:2], 1))])
        assert abs(own - rise) < 1e-4 * max(1.0, float(before)), "ablation differs from intervene"


def patching(model: Any) -> None:
    patched = chosen(model, calls_of(model))
    given = inputs(model, IDS), inputs(model, OTHER)
    found = saccade.patching(model, *given, last_state, by="exact", heads=dict.fromkeys(patched))
    for call in patched:
        check_effects(found.exact, [call])


def paths(model: Any) -> None:
    *earlier, last = calls_of(model)
    given = inputs(model, IDS), inputs(model, OTHER)
    found = saccade.patching(model, *given, last_state, by="gradient", through=(last, None, "query"))
    check_effects(found.gradient, earlier)


def check_effects(found: Any, patched: list[str]) -> None:
    """All heads of these calls have an effect that is a number, and some have one that is not 0."""
    by_call = zip(found.calls, found.values.split([call.heads for call in found.calls]), strict=True)
    values = torch.cat(
        [own for call, own in by_call if any(f"{call.name}.".startswith(f"{name}.") for name in patched)]
    )
    assert torch.isfinite(values).all(), "effects are not finite"
    assert values.any(), "the effects of all heads are 0"


def prune(model: Any) -> None:
    calls = chosen(model, saccade.head_importance(model, [IDS], size).values.calls)
    groups = {call.name: list(range(call.heads // 2)) for call in calls}
    with torch.no_grad():
        with saccade.intervene(model, {name: Ablate(group) for name, group in groups.items()}):
            expected = run(model, IDS)
        saccade.prune(model, groups)
        assert torch.allclose(run(model, IDS), expected, atol=1e-4), "the pruned model differs from the ablated one"


def step(model: Any) -> None:
    """The last call's modules, from the norm to the residual stream: each is compared with what it gave."""
    model = reader(model).float()  # as it is used: rotations are computed in single precision
    calls: list[Any] = []

    def read_ids(observe: Callable[[int, Any], None]) -> None:
        calls.clear()

        def tell(call: Any) -> None:
            observe(len(calls), call)
            calls.append(call)

        with torch.no_grad(), calls_told_to(tell):
            model(input_ids=IDS)

    read_ids(lambda layer, call: None)
    assert calls, "attention is computed in code of its own, which no attention function is asked for"
    found, unknown = of_module(model, read_ids, (len(calls) - 1, 1), POSITION)
    assert not unknown, f"the attention call alone is shown: {unknown}"
    assert found.around is not None and found.around.adds, "the sum with the residual stream was not seen"


def calls_of(model: Any) -> list[str]:
    return [call.name for call in saccade.head_importance(model, [IDS], size).values.calls]


def chosen(model: Any, calls: Sequence[Any]) -> list[Any]:
    """The first call; of an encoder-decoder the last two as well, which are its decoder's."""
    return [calls[0], *(calls[-2:] if model.config.is_encoder_decoder else ())]


def inputs(model: Any, ids: Tensor) -> dict[str, Any]:
    """The arguments of the model, with targets that are shorter than their source."""
    targets = {"decoder_input_ids": ids[:, : POSITION + 1], "use_cache": False}
    return {"input_ids": ids, **(targets if model.config.is_encoder_decoder else {})}


def reader(model: Any) -> Any:
    return model.get_encoder() if model.config.is_encoder_decoder else model


def state(out: Any) -> Tensor:
    return out.logits if "logits" in out else out.last_hidden_state


def run(model: Any, ids: Tensor) -> Tensor:
    return state(model(**inputs(model, ids)))


def size(model: Any, ids: Tensor) -> Tensor:
    return run(model, ids).square().mean()


def last_state(out: Any) -> Tensor:
    return state(out)[0, -1, :7].sum()


TOOLS: dict[str, Callable[[Any], None]] = {
    "attribute": attribute,
    "why_attends": why,
    "step": step,
    "head_importance": importance,
    "patching": patching,
    "path patching": paths,
    "prune": prune,
}


def outcome(tool: Callable[[Any], None], kind: str) -> str:
    """WORKS, or the reason."""
    try:
        torch.manual_seed(5)
        model: Any = zoo.tiny(kind)
        try:
            tool(model.double().eval())
        except Exception as error:
            if not any(word in str(error) for word in IN_SINGLE):
                raise
            tool(model.float())
    except Exception as error:
        return reason(error)
    return WORKS


def reason(error: Exception) -> str:
    """What the error says, without what differs from type to type; and who raised it, if it is no message of ours."""
    said = re.sub(r"^\w+: ", "", " ".join(str(error).split()))
    for differs, instead in DIFFERS.items():
        said = re.sub(differs, instead, said)
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    ours = re.search("/(saccade|attribution|verification)/", last.filename)
    if not ours or not (last.line or "").startswith(("raise", "assert")):
        theirs = any(re.search("/(transformers|huggingface_hub)/", frame.filename) for frame in frames)
        said = (
            f"{'transformers' if theirs else 'Saccade'} raises {type(error).__name__}: {re.sub(r'[0-9]+', 'N', said)}"
        )
    return textwrap.shorten(said, 160, placeholder=" ...").replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--page")
    given = parser.parse_args()
    kinds = given.types or zoo.families()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[tuple[str, str], str] = {}
    for kind in kinds:
        for name, tool in TOOLS.items():
            found[kind, name] = outcome(tool, kind)
            print(f"{kind:24} {name:15} {found[kind, name]}", flush=True)
    counts = [
        f"- `{name}`: {sum(found[kind, name] == WORKS for kind in kinds)} of {len(kinds)} types" for name in TOOLS
    ]
    print("\n".join(counts))
    if given.page:
        page = HEADER.format(page=given.page, counts="\n".join(counts), rows="\n".join(rows(found)))
        Path(given.page).write_text(page)


def rows(found: dict[tuple[str, str], str]) -> list[str]:
    """The table: each reason once, that of most types first, with the types by the tools that it holds for."""
    types: dict[str, dict[str, list[str]]] = {}
    for kind in dict.fromkeys(kind for kind, _ in found):
        for said in dict.fromkeys(found[kind, name] for name in TOOLS):
            names = [name for name in TOOLS if found[kind, name] == said]
            if said != WORKS:
                tools = "all" if len(names) == len(TOOLS) else ", ".join(names)
                types.setdefault(said, {}).setdefault(tools, []).append(kind)
    most_first = sorted(types.items(), key=lambda item: -sum(map(len, item[1].values())))
    by_reason = {said: [f"{tools}: `{', '.join(kinds)}`" for tools, kinds in held.items()] for said, held in most_first}
    return [f"| {said} | {'; '.join(held)} |" for said, held in by_reason.items()]


if __name__ == "__main__":
    main()
