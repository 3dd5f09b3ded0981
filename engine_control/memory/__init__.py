"""Memory that an engine gives back while a trainer needs it: what is held under which tag, and how it is freed."""
