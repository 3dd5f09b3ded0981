"""The control layer over HTTP: one set of commands under SGLang's names (`sglang`) and under vLLM's (`vllm`).

Both are routers that any engine's app mounts. No route touches a model: it reads its fields, has the engine's loop run
a command between two steps, and answers. A client that leaves doesn't cancel a command.

Beside them is what every engine's app is made of: its process (`serving`), its engine's (`service`), limits on requests
(`middleware`, `connections`), `health` and `metrics`.
"""
