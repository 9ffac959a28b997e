"""The package that runs, tests and builds the book.

Each layer imports only layers that are below it in this list:

- ``worldsize.tools``: command-line tools, for example to record outputs on a GPU
- ``worldsize.testing``: the pytest plugin, which runs programs and compares their outputs
- ``worldsize.site``: the MkDocs plugin and the Markdown extension
- ``worldsize.execution``: starts commands, ends their processes, and checks the host
- ``worldsize.model``: programs, transcripts and pages as data

``testing`` and ``site`` do not import each other.
"""
