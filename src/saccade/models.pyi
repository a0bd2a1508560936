from .make.models import *
