def draw():
    raise NotImplementedError
