from .see.monitoring import *
