"""Self-attention for PyTorch: compute it, see it, verify it, choose the right variant, build with it.

    Compute attention
        attention, attention_with_lse, merge    exact, on CPUs and GPUs, in linear memory
        attention_weights, statistics           weights of chosen rows; entropy, masses and norms of all
        explain                                 which backend a call takes, and why
        flex_attention                          PyTorch's FlexAttention, argument for argument, that trains on CPUs
        Causal, Window, Padding, Documents ...  masks as values: combine them with & | ~
        ALiBi, RelativeBias, Score, Dropout     biases, score functions and dropout as values
        accelerate                              any PyTorch model on Saccade's CPU kernels
        distributed                             one sequence over several processes: attention on shards of it
    Build and train models
        nn, positions, batching                 modules, blocks, stacks, caches; positions; padding and packing
        variants                                sparse patterns, and other mechanisms than softmax attention
        models, integrations                    published families with their weights; transformers and Lightning
        training, tasks                         one trainer, and tasks on real data
    See what a model attends to
        view, draw, diagram, step               interactive, as a figure, as a diagram, step by step
        watch                                   every attention call of a model that runs; room: monitoring
        inspection, analysis                    one text; many texts
    Find out what heads do, and change them
        attribute, why_attends                  a logit, or a weight, as a sum over components
        head_importance, patching               heads, measured; room: attribution
        intervene, prune                        change heads while a model runs; remove them for good
    Check and compare
        verify                                  any attention, against the contract; room: verification
        verify_stack                            a model with its collator, packing, cache and training step
        verified                                a test that returns such a stack
        benchmark                               speed, memory and quality of attention and its variants

`help(saccade.NAME)` describes a name. Rooms are subpackages, such as `saccade.nn`; they need no import of their own.

Example:
    >>> import torch, saccade
    >>> query, key, value = torch.randn(3, 1, 8, 128, 64)
    >>> saccade.attention(query, key, value, saccade.Causal() & saccade.Window(31, 0)).shape
    torch.Size([1, 8, 128, 64])
"""

from __future__ import annotations

from .support import _addresses, _registered

__version__ = "0.2.0"

__all__ = [
    "ALiBi",
    "Acceleration",
    "Blocks",
    "Causal",
    "Chunks",
    "Columns",
    "Dilated",
    "Documents",
    "Dropout",
    "Edges",
    "Fixed",
    "FromTensor",
    "Global",
    "Mask",
    "Padding",
    "PerHead",
    "Plan",
    "Predicate",
    "Prefix",
    "RandomBlocks",
    "RelativeBias",
    "Score",
    "Statistics",
    "Strided",
    "Tile",
    "Window",
    "accelerate",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "attribute",
    "diagram",
    "draw",
    "explain",
    "flex_attention",
    "head_importance",
    "intervene",
    "merge",
    "patching",
    "prune",
    "statistics",
    "step",
    "verified",
    "verify",
    "verify_stack",
    "view",
    "watch",
    "why_attends",
]

# Names and parts are imported when they are first used: `saccade --help` does without PyTorch, and `saccade.nn` needs
# no import of its own. Type checkers read the imports below; a test holds them and these tables together.
_PARTS = ("acceleration", "benchmark", "distributed", "integrations", "verification")
_WINGS = {  # of each room whose address leaves out its wing
    "analysis": "see",
    "attribution": "see",
    "batching": "operator",
    "inspection": "see",
    "intervention": "see",
    "models": "make",
    "monitoring": "see",
    "nn": "operator",
    "positions": "operator",
    "pruning": "make",
    "tasks": "make",
    "training": "make",
    "variants": "operator",
    "viewer": "see",
}
_HOMES = {  # of all names but the masks
    "ALiBi": "operator._biases",
    "Acceleration": "acceleration",
    "Dropout": "operator._dropout",
    "Plan": "operator._explain",
    "RelativeBias": "operator._biases",
    "Score": "operator._scores._score",
    "Statistics": "operator._statistics",
    "accelerate": "acceleration",
    "attention": "operator._attention",
    "attention_weights": "operator._weights",
    "attention_with_lse": "operator._attention",
    "attribute": "see.attribution",
    "diagram": "see.viewer._diagram",
    "draw": "see.viewer",
    "explain": "operator._explain",
    "flex_attention": "operator._flex_attention",
    "head_importance": "see.attribution",
    "intervene": "see.intervention",
    "merge": "operator._attention",
    "patching": "see.attribution",
    "prune": "make.pruning",
    "statistics": "operator._statistics",
    "step": "see.viewer",
    "verified": "verification",
    "verify": "verification",
    "verify_stack": "verification",
    "view": "see.viewer",
    "watch": "see.monitoring",
    "why_attends": "see.attribution",
}

_addresses.install(__name__, _WINGS)

_COMMANDS = {  # what a part has under the name of a command
    "bench": "benchmark",
    "compare": "benchmark.variants",
    "distill": "tasks.distill",
    "embed": "models.embed",
    "generate": "models.generate",
    "heads": "head_importance",
    "load": "models.load",
    "look": "inspection.look",
    "predict": "tasks.predict",
    "test": "tasks.test",
    "train": "tasks.train",
}


def _viewer() -> object:
    from .see import viewer

    return viewer


def _verified_models() -> object:
    from .integrations import _verification

    return _verification


_registered.register(viewer=_viewer, verified_models=_verified_models)


TYPE_CHECKING = False  # not from `typing`: until the command's `main` is reached, Ctrl-C is a traceback
if TYPE_CHECKING:
    # isort: off
    from . import (
        acceleration as acceleration,
        benchmark as benchmark,
        distributed as distributed,
        integrations as integrations,
        verification as verification,
    )
    from .make import models as models, pruning as pruning, tasks as tasks, training as training
    from .operator import batching as batching, nn as nn, positions as positions, variants as variants
    from .see import (
        analysis as analysis,
        attribution as attribution,
        inspection as inspection,
        intervention as intervention,
        monitoring as monitoring,
        viewer as viewer,
    )

    # isort: on
    from .acceleration import Acceleration, accelerate
    from .make.pruning import prune
    from .operator._attention import attention, attention_with_lse, merge
    from .operator._biases import ALiBi, RelativeBias
    from .operator._dropout import Dropout
    from .operator._explain import Plan, explain
    from .operator._flex_attention import flex_attention
    from .operator._masks import (
        Blocks,
        Causal,
        Chunks,
        Columns,
        Dilated,
        Documents,
        Edges,
        Fixed,
        FromTensor,
        Global,
        Mask,
        Padding,
        PerHead,
        Predicate,
        Prefix,
        RandomBlocks,
        Strided,
        Tile,
        Window,
    )
    from .operator._scores._score import Score
    from .operator._statistics import Statistics, statistics
    from .operator._weights import attention_weights
    from .see.attribution import attribute, head_importance, patching, why_attends
    from .see.intervention import intervene
    from .see.monitoring import watch
    from .see.viewer import draw, step, view
    from .see.viewer._diagram import diagram
    from .verification import verified, verify, verify_stack
else:

    def __getattr__(name: str) -> object:
        """A public name or a part, imported now and kept: this is asked once for each."""
        from importlib import import_module

        if name in __all__:
            found = getattr(import_module(f".{_HOMES.get(name, 'operator._masks')}", __name__), name)
        elif name in _PARTS or name in _WINGS:
            found = import_module(f".{name}", __name__)
        else:
            import sys

            hint = f"; there is saccade.{_COMMANDS[name]}" if name in _COMMANDS else ""
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__]
            )
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted([*__all__, *_PARTS, *_WINGS, "__version__"])
