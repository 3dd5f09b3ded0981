"""The one layer that every engine of this project shares: its step loop, errors, wire format and process supervision.

It imports no sibling package. A file belongs here only if both engines call it.
"""

__version__ = "0.1.0"
