from .make.training import *
