from .see.inspection import *
