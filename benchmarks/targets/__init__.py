"""The speeds that the native kernels are held to, for `benchmarks/attention_targets.py`.

Begin with `catalogue.py`; `requirements.py` is what may be asked, `arithmetic.py` what arithmetic allows of what is
missed, `judging.py` how a run comes about, `subject.py` the contender that is held to them.
"""
