from ..operator.variants.feature_maps import *
