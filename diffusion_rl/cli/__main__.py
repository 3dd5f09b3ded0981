"""`python -m diffusion_rl.cli`, the same as `diffusion-rl`."""

from diffusion_rl.cli import main

if __name__ == "__main__":
    main()
