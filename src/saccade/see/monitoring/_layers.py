"""What the layers of a model are that have no softmax attention, such as the linear layers of a hybrid model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from ...support._numbers import joined


def layers_without_attention(
    model: nn.Module, ran: Collection[str], attention: Collection[str], unknown: Collection[str] = ()
) -> dict[str, str]:
    """The layers without attention beside layers that have some: by path, the class that mixes their tokens.

    Layers are the entries of an outermost `nn.ModuleList`. If nothing in the model has attention, they are those of the
    longest one.

    Args:
        ran: paths of modules that ran; layers that did not are left out.
        attention: paths of modules that called attention.
        unknown: paths of modules inside which calls may be hidden: nothing is said of these.
    """
    stacks = list(_stacks(model))
    if not attention:
        stacks = sorted(stacks, key=lambda stack: -len(stack))[:1]
    found: dict[str, str] = {}
    for layers in stacks:
        having = {path: inside for path in layers if (inside := _inside(path, attention))}
        if attention and not having:
            continue
        places = {inner.split(".")[0] for inside in having.values() for inner in inside}
        beside = {name for path in having for name, _ in layers[path].named_children()}
        for path, layer in layers.items():
            hidden = _inside(path, unknown) or any(_inside(outer, [path]) for outer in unknown)
            if path in ran and path not in having and not hidden:
                found[path] = _mixer(layer, places, beside)
    return found


def _stacks(model: nn.Module, path: str = "") -> Iterator[dict[str, nn.Module]]:
    """The layers of each outermost `nn.ModuleList`, by path."""
    if isinstance(model, nn.ModuleList):
        yield {f"{path}.{name}" if path else name: layer for name, layer in model.named_children()}
        return
    for name, child in model.named_children():
        yield from _stacks(child, f"{path}.{name}" if path else name)


def _inside(outer: str, paths: Collection[str]) -> list[str]:
    """The paths that are `outer` or within it, from there on."""
    return [path[len(outer) + 1 :] for path in paths if not outer or path == outer or path.startswith(f"{outer}.")]


def _mixer(layer: nn.Module, places: Collection[str], beside: Collection[str]) -> str:
    """The class of what stands where other layers have attention, or of what only this layer has; or its own."""
    children = dict(layer.named_children())
    there = [child for name, child in children.items() if name in places]
    own = [
        child for name, child in children.items() if name not in beside and "norm" not in type(child).__name__.lower()
    ]
    return joined([type(child).__name__ for child in there or own]) or type(layer).__name__


def sentences(layers: Mapping[str, str]) -> list[str]:
    """One for each kind of layer in each stack: "layers 0 to 2 of model.layers are Mixer"."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for path, kind in layers.items():
        stack, _, number = path.rpartition(".")
        kinds.setdefault((stack, kind), []).append(int(number))
    return [
        f"{'layer' if len(numbers) == 1 else 'layers'} {_ranges(numbers)} of {stack or 'the model'} "
        f"{'is' if len(numbers) == 1 else 'are'} {kind}"
        for (stack, kind), numbers in kinds.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """ "0, 1, 4 to 6 and 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return joined([word for part in words for word in part])
