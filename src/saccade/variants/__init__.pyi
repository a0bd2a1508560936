from ..operator.variants import *
