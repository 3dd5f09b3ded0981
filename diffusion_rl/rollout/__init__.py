"""A request's path, one room a file: queue, engine, batcher, noise, recorder, and replay, the trainer's half."""
