"""The package that runs, tests and builds the book. Each layer imports only layers below it.

- ``worldsize.tools``      command-line tools: record on a GPU, try newer dependencies, compare
- ``worldsize.testing``    the pytest plugin: collect, run, compare, record
- ``worldsize.site``       the MkDocs plugin and the Markdown extension
- ``worldsize.execution``  run commands, end their processes, check the host
- ``worldsize.model``      programs, transcripts, pages

``testing`` and ``site`` do not import each other.
"""
