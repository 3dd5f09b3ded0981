"""Triton source, one file an operation. Imported by the first launch, never before: Triton is optional."""
