"""Self-attention for PyTorch: compute it, see it, verify it, choose the right variant, build with it.

    Compute attention
        attention, attention_with_lse, merge    exact, on CPUs and GPUs, in linear memory
        attention_weights, statistics           weights of chosen rows; entropy, masses and norms of all
        explain                                 which backend a call takes, and why
        Causal, Window, Padding, Documents ...  masks as values: combine them with & | ~
        ALiBi, RelativeBias, Dropout            biases and dropout as values
        accelerate                              any PyTorch model on Saccade's CPU kernels
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
        benchmark                               speed, memory and quality of attention and its variants

`help(saccade.NAME)` describes a name. Rooms are subpackages, such as `saccade.nn`; they need no import of their own.

Example:
    >>> import torch, saccade
    >>> query, key, value = torch.randn(3, 1, 8, 128, 64)
    >>> saccade.attention(query, key, value, saccade.Causal() & saccade.Window(31, 0)).shape
    torch.Size([1, 8, 128, 64])
"""

from __future__ import annotations

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
    "head_importance",
    "intervene",
    "merge",
    "patching",
    "prune",
    "statistics",
    "step",
    "verify",
    "view",
    "watch",
    "why_attends",
]

# Names and parts are imported when they are first used: `saccade --help` does without PyTorch, and `saccade.nn` needs
# no import of its own. Type checkers read the imports below; a test holds them and these tables together.
_PARTS = (
    "acceleration",
    "analysis",
    "attribution",
    "batching",
    "benchmark",
    "inspection",
    "integrations",
    "intervention",
    "models",
    "monitoring",
    "nn",
    "positions",
    "pruning",
    "tasks",
    "training",
    "variants",
    "verification",
    "viewer",
)
_HOMES = {  # of all names but the masks
    "ALiBi": "_biases",
    "Acceleration": "acceleration",
    "Dropout": "_dropout",
    "Plan": "_explain",
    "RelativeBias": "_biases",
    "Statistics": "_statistics",
    "accelerate": "acceleration",
    "attention": "_attention",
    "attention_weights": "_weights",
    "attention_with_lse": "_attention",
    "attribute": "attribution",
    "diagram": "viewer._diagram",
    "draw": "viewer",
    "explain": "_explain",
    "head_importance": "attribution",
    "intervene": "intervention",
    "merge": "_attention",
    "patching": "attribution",
    "prune": "pruning",
    "statistics": "_statistics",
    "step": "viewer",
    "verify": "verification",
    "view": "viewer",
    "watch": "monitoring",
    "why_attends": "attribution",
}

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

TYPE_CHECKING = False  # not from `typing`: until the command's `main` is reached, Ctrl-C is a traceback
if TYPE_CHECKING:
    # isort: off
    from . import (
        acceleration as acceleration,
        analysis as analysis,
        attribution as attribution,
        batching as batching,
        benchmark as benchmark,
        inspection as inspection,
        integrations as integrations,
        intervention as intervention,
        models as models,
        monitoring as monitoring,
        nn as nn,
        positions as positions,
        pruning as pruning,
        tasks as tasks,
        training as training,
        variants as variants,
        verification as verification,
        viewer as viewer,
    )

    # isort: on
    from ._attention import attention, attention_with_lse, merge
    from ._biases import ALiBi, RelativeBias
    from ._dropout import Dropout
    from ._explain import Plan, explain
    from ._masks import (
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
    from ._statistics import Statistics, statistics
    from ._weights import attention_weights
    from .acceleration import Acceleration, accelerate
    from .attribution import attribute, head_importance, patching, why_attends
    from .intervention import intervene
    from .monitoring import watch
    from .pruning import prune
    from .verification import verify
    from .viewer import draw, step, view
    from .viewer._diagram import diagram
else:

    def __getattr__(name: str) -> object:
        """A public name or a part, imported now and kept: this is asked once for each."""
        from importlib import import_module

        if name in __all__:
            found = getattr(import_module(f".{_HOMES.get(name, '_masks')}", __name__), name)
        elif name in _PARTS:
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
        return sorted([*__all__, *_PARTS, "__version__"])
