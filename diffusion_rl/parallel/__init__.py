"""Several rank processes compute one model together. Nothing outside this package knows of ranks.

`layout` says who does what, `groups` is how ranks exchange tensors, `sequence` splits a transformer's tokens, `cfg` the
two halves of guidance, `followers` runs the other ranks' processes behind rank 0.
"""
