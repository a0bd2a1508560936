"""See: what models attend to in one text or many, what their heads do, and what changes when heads are changed.

`inspection` reads one text, `analysis` many, `monitoring` every call of a running model; `attribution` splits logits,
`intervention` changes heads; `viewer` draws all of these.
"""
