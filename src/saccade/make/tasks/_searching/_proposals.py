"""The next trial of a search, hopeless trials, and the importance of settings, by Optuna.

Nothing is kept between two trials. So a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._space import Between, OneOf, Space
from ._trials import DIVERGED, TOO_LARGE, Trial, ranked

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

DRAWN = 6  # trials before any is guided by others, or given up
SPARED = 1  # looks of a trial after which it is not given up


class Proposal:
    """The next trial, chosen from the results of those before it.

    Args:
        known: trials that are done.
        settings: of the trial; None asks the sampler (TPE: Bergstra et al., "Algorithms for Hyper-Parameter
            Optimization", 2011).

    Attributes:
        settings: by option.
    """

    def __init__(self, space: Space, known: Sequence[Trial], seed: int, settings: dict[str, Any] | None = None):
        with _quiet():
            values = {trial.number: float(place) for place, trial in enumerate(ranked(known))}  # TPE reads their order
            study = _study(space, known, values, int(np.random.SeedSequence((seed, len(known))).generate_state(1)[0]))
            self._trial = study.ask({} if settings is not None else _distributions(space))
        self.settings = _rounded(space, self._trial.params) if settings is None else settings

    def is_hopeless(self, look: int, cost: float) -> bool:
        """Add the cost of an evaluation of the trial (lower is better). Returns whether the lowest cost so far is above
        the median of the other trials after as many evaluations."""
        with _quiet():
            self._trial.report(cost, look)
            return self._trial.should_prune()


def importance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """The share of each setting in the variance of the cost of ended trials (fANOVA: Hutter et al. 2014).

    Empty for fewer than four such trials, or if all of them are equally good.
    """
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    ended = ranked(trials)
    costs = {trial.number: trial.cost for trial in ended if trial.cost is not None}
    if len(ended) < 4 or len({*costs.values()}) < 2:
        return {}
    with _quiet():
        shares = get_param_importances(_study(space, ended, costs, 0), evaluator=FanovaImportanceEvaluator(seed=0))
    return {name: float(share) for name, share in shares.items()}


def _study(space: Space, known: Sequence[Trial], values: Mapping[int, float], seed: int) -> Study:
    """Optuna's study of the known trials. `values`: the results of the trials that ended, by number."""
    import optuna

    study = optuna.create_study(
        direction="minimize",
        sampler=optuna.samplers.TPESampler(n_startup_trials=DRAWN, seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=DRAWN, n_warmup_steps=SPARED + 1),
    )
    study.add_trials([_as_theirs(space, trial, values.get(trial.number)) for trial in known])
    return study


def _as_theirs(space: Space, trial: Trial, value: float | None) -> FrozenTrial:
    """A trial that diverged or did not fit into memory counts as pruned at once: worse than all others."""
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
        value=value,
        params=trial.settings,
        distributions=_distributions(space),
        intermediate_values={} if trial.state in (DIVERGED, TOO_LARGE) else dict(enumerate(trial.looks, 1)),
    )


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    return {
        name: CategoricalDistribution(choice.values)
        if isinstance(choice, OneOf)
        else FloatDistribution(choice.low, choice.high, log=choice.logarithmic, step=choice.step)
        for name, choice in space.items()
    }


def _rounded(space: Space, drawn: dict[str, Any]) -> dict[str, Any]:
    return {
        name: choice.rounded(drawn[name]) if isinstance(choice, Between) else drawn[name]
        for name, choice in space.items()
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna, which logs every study and trial on standard error."""
    import optuna

    usual = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(usual)
