"""Several rank processes compute one model together. Nothing outside this package knows of ranks.

`layout` says who does what, `sequence` splits a transformer's tokens, `cfg` the
two halves of guidance, `tensor` the weights; `ranks` is rank 0's view of the other ranks' processes.
"""
