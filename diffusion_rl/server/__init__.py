"""The HTTP service: `app.create_app` and `app.serve`. Importing this package loads nothing, FastAPI least of all."""
