# Two commands are all that a reader needs: `make serve` and `make test`. `make help` lists the rest.
#
# Each command makes its own .venv from the pinned requirements; a second call starts at once.
# With PYTHON=python3 the commands `test`, `record` and `gpu` use that Python as it is and install nothing.
# With TORCH=2.14.1 they run on that release of torch, in a .venv-2.14.1 of its own.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

WHAT ?=
ARGS ?=
BUDGET ?=
ARCHIVE ?=
TORCH ?=
RELEASES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
ADDRESS ?= 127.0.0.1:8000
BASE_PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' && echo $$p && break; done)
VENV := .venv$(addprefix -,$(TORCH))
comma := ,
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles what is imported, a quarter of all; that pip compiles everything took it as long as the rest.
export PIP_NO_COMPILE := 1
# Python keeps what it compiled, whatever the shell says: compiling at each start took as long as importing does.
unexport PYTHONDONTWRITEBYTECODE
export NO_MKDOCS_2_WARNING := 1

ifeq ($(origin PYTHON),command line)
RUN := $(PYTHON)
READ :=
BOOK :=
ZENSICAL :=
TEST :=
else
RUN := $(VENV)/bin/python
READ := $(VENV)/.read
BOOK := $(VENV)/.book
ZENSICAL := $(VENV)/.zensical
TEST := $(VENV)/.test
ifneq ($(shell $(VENV)/bin/python -c '' 2>/dev/null && echo starts),starts)
.PHONY: $(READ) $(BOOK) $(ZENSICAL) $(TEST)
endif
endif

# Two workers more than there are cores, for some tests only wait; none where there is no pytest-xdist.
WORKERS = $(shell $(RUN) -c 'import importlib.util as u, os; print(f"-n {(os.cpu_count() or 1) + 2} --dist loadscope" if u.find_spec("xdist") else "")')

# pytest and MkDocs end with a traceback where there is no folder that takes a temporary file.
define room
@$(RUN) -c $$'import sys, tempfile\ntry: tempfile.gettempdir()\nexcept OSError: sys.exit("No folder takes a temporary file, \
most often because the disk is full: make room, or name another folder, TMPDIR=FOLDER make $@")'
endef

.PHONY: help serve test versions mutants record site book zensical gpu clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  WHAT=snippets/02_ddp     only these programs or chapters (test, mutants, record, gpu)'
	@echo '  TORCH=2.14.1             on another release of torch, in a .venv of its own (test, record)'
	@echo '  RELEASES="2.13.0 2.15.0" these releases of torch ($(RELEASES); versions)'
	@echo '  PYTHON=python3           with this Python as it is, installing nothing (test, record, gpu)'
	@echo '  ARGS="-x --warm"         more options for pytest'
	@echo '  BUDGET=540               end after so many seconds; the next call goes on from there (gpu)'
	@echo '  ARCHIVE=new.tar.gz       put all that is new into this file as well (gpu)'
	@echo '  ADDRESS=127.0.0.1:8001   where serve listens'

serve: $(READ) ## build the book and read it on localhost, reloading as you edit
	$(room)
	@$(RUN) -c 'import socket, sys; host, _, port = sys.argv[1].rpartition(":"); socket.create_server((host, int(port)))' $(ADDRESS) 2>/dev/null || { \
		echo 'Nothing can be served at $(ADDRESS), most often because something else is: name another port, make serve ADDRESS=127.0.0.1:8001' >&2; exit 1; }
	@echo 'The book will be at http://$(ADDRESS)/ (stop with Ctrl-C)'
	@$(RUN) -m mkdocs serve --dev-addr $(ADDRESS) --open

test: $(TEST) ## run everything that runs
	$(room)
	@$(RUN) -m pytest $(WORKERS) $(ARGS) $(WHAT)

versions: ## run the programs on other releases of torch, and note in snippets/held.csv what held
	@$(foreach torch,$(RELEASES),$(MAKE) test TORCH=$(torch) ARGS="--held $(ARGS)" WHAT="$(or $(WHAT),snippets labs assessment docs)" || failed='$(torch) '"$${failed:-}"; ) \
		test -z "$${failed:-}" || { echo "not as recorded on torch $$failed" >&2; exit 1; }

mutants: $(TEST) ## make each program wrong in known ways: what still passes cannot fail
	$(room)
	@$(RUN) -m pytest --mutants all --warm $(WORKERS) $(ARGS) $(or $(WHAT),snippets labs assessment)

record: $(TEST) ## run programs one after the other and rewrite the transcripts that no longer hold
	$(room)
	@$(RUN) -m pytest --record --device cpu $(ARGS) $(or $(WHAT),snippets labs assessment docs)

site: $(READ) ## build the book into site/, strictly
	$(room)
	@$(RUN) -m mkdocs build --strict && echo 'The book is in site/index.html'

book: site $(BOOK) ## bind the book and each track as PDF and EPUB, and zip the site, in site/book/
	@$(RUN) -m book.site.bound site

zensical: site $(ZENSICAL) ## build the book with Zensical, too, and compare the two
	@$(RUN) -m book.site.zensical site

gpu: $(TEST) ## record what has something to show on this machine's GPUs (*.cuda.txt)
	$(room)
	@$(RUN) -m book.run.gpu $(if $(BUDGET),--budget $(BUDGET)) $(if $(ARCHIVE),--archive $(ARCHIVE)) $(WHAT)

clean: ## remove what these commands made
	rm -rf .venv .venv-* site .cache .pytest_cache .ruff_cache

# --- set-up: one .venv, filled in steps, so that reading does not wait for torch ---
#
# The next call makes good what was ended in the middle: a .venv whose Python or pip does not start is made again,
# and a package of which pip has not written INSTALLER, its last file, is installed again.

define install
@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
	test -n '$(BASE_PYTHON)' || { echo 'World Size needs Python 3.11, 3.12 or 3.13; none is on the PATH.' >&2; exit 1; }; \
	echo 'Making $(VENV) with $(BASE_PYTHON)'; $(BASE_PYTHON) -m venv --clear $(VENV); }
@for found in $(VENV)/lib/python*/site-packages/*.dist-info; do test -e $$found/INSTALLER || rm -rf $$found; done
@echo 'Installing what $(1)'
@sed -E $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^(triton|cuda-bindings)==/d') -e 's/^-r /-r ..\/requirements\//' $< >$(VENV)/wanted.txt
@$(VENV)/bin/python -m pip install -r $(VENV)/wanted.txt || { \
	echo 'pip says above why it stopped: no network, or no room, most often. The same command goes on from there.' >&2; exit 1; }
endef

$(VENV)/.read: requirements/read.txt
	$(call install,reading needs (once))
	@touch $@

$(VENV)/.book: requirements/book.txt requirements/read.txt
	$(call install,binding needs (once))
	@touch $@ $(VENV)/.read

$(VENV)/.zensical: requirements/zensical.txt requirements/read.txt
	$(call install,building with Zensical needs (once))
	@touch $@ $(VENV)/.read

$(VENV)/.test: requirements/test.txt requirements/book.txt requirements/read.txt
	$(call install,running needs$(comma) torch among it (once; a few minutes on a slow line))
	@touch $@ $(VENV)/.book $(VENV)/.read
