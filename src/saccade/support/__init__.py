"""What every part may use and none is about: numbers as text, extras, whole files, seeds, the machine, the terminal."""
