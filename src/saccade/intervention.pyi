from .see.intervention import *
