from .make.tasks import *
