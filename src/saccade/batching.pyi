from .operator.batching import *
