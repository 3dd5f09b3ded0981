"""New weights for a running engine, all or nothing: transports bring tensors; one session applies, verifies,
and commits or undoes."""
