from .see.analysis import *
