from .operator.nn import *
