"""What weights look like on their way: flat buffers, safetensors, and the pickles of SGLang-style trainers, read as
plain data. Nothing here executes what it reads, and sizes are checked before memory of that size is taken."""
