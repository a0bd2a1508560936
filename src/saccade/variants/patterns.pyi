from ..operator.variants.patterns import *
