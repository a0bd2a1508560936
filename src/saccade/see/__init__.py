"""See: what one text or many make a model attend to, what its heads do, and what changes when these are changed.

`inspection` reads one text, `analysis` many, `monitoring` every call of a running model; `attribution` splits logits,
`intervention` changes heads; `viewer` draws all of these.
"""
