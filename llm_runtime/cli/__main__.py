"""`python -m llm_runtime.cli`, the same as `llm-runtime`."""

from llm_runtime.cli import main

if __name__ == "__main__":
    main()
