from .operator.positions import *
