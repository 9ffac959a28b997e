# A reader needs only two commands: `make serve` and `make test`. `make help` lists all commands.
#
# The first call of a command creates the environment .venv from the pinned requirements. Later calls start at once.
# With PYTHON=python3, all commands use this Python as it is, and install nothing.
# With TORCH=2.14.1, all commands use this release of torch, in the separate environment .venv-2.14.1.

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
# Without this setting, pip compiles all installed files, which doubles the time of an installation. Python compiles only
# the files that it imports, which are a quarter of all files.
export PIP_NO_COMPILE := 1
# Let Python store compiled files, even if the shell forbids it. Otherwise Python compiles them again at each start.
unexport PYTHONDONTWRITEBYTECODE
export NO_MKDOCS_2_WARNING := 1
# Python finds the package worldsize in src/ of this working tree, even if the environment belongs to a different working
# tree. MkDocs finds the plugin through the metadata of the installed package.
export PYTHONPATH := $(CURDIR)/src$(addprefix :,$(PYTHONPATH))

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

# Use two workers more than there are cores, because some tests only wait. Without pytest-xdist, pytest uses no workers.
WORKERS = $(shell $(RUN) -c 'import importlib.util as u, os; print(f"-n {(os.cpu_count() or 1) + 2} --dist loadscope" if u.find_spec("xdist") else "")')

# If they cannot write temporary files, pytest and MkDocs end with a traceback. Print one sentence instead.
define require_temporary_folder
@$(RUN) -c $$'import sys, tempfile\ntry: tempfile.gettempdir()\nexcept OSError: sys.exit("make $@ cannot write a temporary file, \
probably because the disk is full. Free some space, or use a different folder: TMPDIR=FOLDER make $@")'
endef

.PHONY: help serve test test-torch-versions mutants update-mutants record site ebook compare-zensical record-gpu clean versions book zensical gpu

help: ## list all commands and settings
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'Settings. Write them after a command. The parentheses list the commands that use a setting:'
	@echo '  WHAT=snippets/02_ddp          run only these programs, pages or tests (test, mutants, update-mutants, record and others)'
	@echo '  TORCH=2.14.1                  use this release of torch, in a separate environment (test, record)'
	@echo '  RELEASES="2.13.0 2.15.0"      use these releases of torch; the default is $(RELEASES) (test-torch-versions)'
	@echo '  PYTHON=python3                use this Python as it is, and install nothing (all commands)'
	@echo '  ARGS="-x --launcher=prefork"  pass these options to pytest (test, test-torch-versions, mutants, record)'
	@echo '  BUDGET=540                    stop after 540 seconds; the next call continues from there (record-gpu)'
	@echo '  ARCHIVE=new.tar.gz            also write all new transcripts to this file (record-gpu)'
	@echo '  ADDRESS=127.0.0.1:8001        show the book at this address and port (serve)'

serve: $(READ) ## show the book on localhost, and build a page again when you edit it
	$(require_temporary_folder)
	@$(RUN) -c 'import socket, sys; host, _, port = sys.argv[1].rpartition(":"); socket.create_server((host, int(port)))' $(ADDRESS) 2>/dev/null || { \
		echo 'make serve cannot use the address $(ADDRESS), probably because a different program uses it. Choose a different port, for example: make serve ADDRESS=127.0.0.1:8001' >&2; exit 1; }
	@echo 'When the book is built, it is at http://$(ADDRESS)/ (stop with Ctrl-C)'
	@$(RUN) -m mkdocs serve --dev-addr $(ADDRESS) --open

test: $(TEST) ## run all programs and tests, and compare the output of the programs with the book
	$(require_temporary_folder)
	@$(RUN) -m pytest $(WORKERS) $(ARGS) $(WHAT)

test-torch-versions: ## run the programs on several releases of torch, and write the results to snippets/compatibility.csv
	@$(foreach torch,$(RELEASES),$(MAKE) test TORCH=$(torch) ARGS="--record-compatibility $(ARGS)" WHAT="$(or $(WHAT),snippets labs assessment docs)" || failed='$(torch) '"$${failed:-}"; ) \
		test -z "$${failed:-}" || { echo "With torch $$failed some outputs differ from the recorded outputs, or a test failed for a different reason" >&2; exit 1; }

mutants: $(TEST) ## change each program so that it is wrong, and list the wrong versions that the tests do not detect
	$(require_temporary_folder)
	@$(RUN) -m pytest --mutants all --launcher=prefork $(WORKERS) $(ARGS) $(or $(WHAT),snippets labs assessment)

update-mutants: $(READ) ## adapt the lists of mutants to edited programs
	@$(RUN) -m worldsize.tools.update_mutants $(WHAT)

record: $(TEST) ## run the programs one by one, and write the transcripts whose output has changed
	$(require_temporary_folder)
	@$(RUN) -m pytest --record --device cpu $(ARGS) $(or $(WHAT),snippets labs assessment docs)

site: $(READ) ## build the web site in site/, and fail if there is a warning
	$(require_temporary_folder)
	@$(RUN) -m mkdocs build --strict && echo 'The book is in site/index.html'

ebook: site $(BOOK) ## write the book and the tracks as PDF and EPUB files, and a zip of the site, to site/book/
	@$(RUN) -m worldsize.site.ebook_export site

compare-zensical: site $(ZENSICAL) ## also build the web site with Zensical, and compare it with site/
	@$(RUN) -m worldsize.tools.compare_zensical site

record-gpu: $(TEST) ## record the programs that snippets/gpu.toml lists, on the GPUs of this machine
	$(require_temporary_folder)
	@$(RUN) -m worldsize.tools.record_gpu $(if $(BUDGET),--budget $(BUDGET)) $(if $(ARCHIVE),--archive $(ARCHIVE)) $(WHAT)

# These are the names of the first edition, which still work.
versions: test-torch-versions
book: ebook
zensical: compare-zensical
gpu: record-gpu

clean: ## remove the environments, the site and the caches
	rm -rf .venv .venv-* site .cache .pytest_cache .ruff_cache

# --- the environment .venv: packages are added in steps, so that `make serve` does not wait for torch ---
#
# The next call repairs an interrupted installation. If the Python or the pip in .venv does not start, .venv is created
# again. If a package has no file INSTALLER, which pip writes last, the package is installed again. The package of the
# book itself is installed in editable mode, so that MkDocs finds its plugin.

define install
@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
	test -n '$(BASE_PYTHON)' || { echo 'World Size needs Python 3.11, 3.12 or 3.13, but the PATH has none of them. Install one of them, or give its path: make $(MAKECMDGOALS) BASE_PYTHON=/path/to/python3.12' >&2; exit 1; }; \
	echo 'Creating the environment $(VENV) with $(BASE_PYTHON)'; $(BASE_PYTHON) -m venv --clear $(VENV); }
@for found in $(VENV)/lib/python*/site-packages/*.dist-info; do test -e $$found/INSTALLER || rm -rf $$found; done
@echo 'Installing the packages $(1)'
@sed -E $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^(triton|cuda-bindings)==/d') -e 's/^-r /-r ..\/requirements\//' $< >$(VENV)/wanted.txt
@$(VENV)/bin/python -m pip install -r $(VENV)/wanted.txt || { \
	echo 'The installation failed, and pip printed the reason above. Often the network or the disk is the cause. Run the same command again to continue.' >&2; exit 1; }
@$(VENV)/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable . || { \
	echo 'pip could not install the package of the book itself, and printed the reason above. MkDocs needs this package.' >&2; exit 1; }
endef

$(VENV)/.read: requirements/read.txt pyproject.toml
	$(call install,for reading (only once))
	@touch $@

$(VENV)/.book: requirements/book.txt requirements/read.txt pyproject.toml
	$(call install,for PDF and EPUB files (only once))
	@touch $@ $(VENV)/.read

$(VENV)/.zensical: requirements/zensical.txt requirements/read.txt pyproject.toml
	$(call install,for Zensical (only once))
	@touch $@ $(VENV)/.read

$(VENV)/.test: requirements/test.txt requirements/book.txt requirements/read.txt pyproject.toml
	$(call install,for the programs and tests$(comma) including torch (only once; this can take several minutes))
	@touch $@ $(VENV)/.book $(VENV)/.read
