# Penstock. `make help` lists the targets. Everything that is made lies under $(BUILD).
#   CC, CFLAGS, CPPFLAGS, LDFLAGS, LDLIBS
#           yours; the project's own flags are added in front
#   BUILD   where objects, library, binary and environment go (default: build)
#   VENV    the Python environment (default: $(BUILD)/venv)
#   PYTHON  the interpreter it is made from
#   VENV_TEST  the environment of the tests and their references (default: $(VENV)-test), apart
#           from what was built against $(VENV)
#   BLAS    wheel (OpenBLAS from the pinned wheel, default) or system (pkg-config openblas)
#   BLAS_PYTHON  the interpreter that has that wheel (default: that of $(VENV), which is made when
#           missing)
#   CUDA    auto (where nvcc is found, default) | 1 | 0
#   CUDA_HOME  the toolkit, 12.4 or newer (default: that of nvcc)
#   CUDA_ARCH  compute capabilities as "80 86 89 90 100 120" or all (default: of the GPUs here,
#           else 80, which newer GPUs translate at first use)
#   ARCHS   those of cuda-archs (default: 89 120)
#   CUBLAS_PYTHON  the interpreter that has NVIDIA's cuBLAS wheel, where the toolkit comes without
#           cuBLAS (default: that of $(VENV), which gets it)
#   CUDNN   1 (with CUDA, default) | 0: build without attention on GPUs
#   CXX, CXXFLAGS  its C++ compiler and flags (default: -O1)
#   CUDNN_PYTHON  the interpreter that has the wheels of python/requirements-cudnn*.txt (default:
#           that of $(VENV), which gets them)
#   CUDNN_HOME  a cuDNN by itself, its include/ and lib/
#   CUDNN_FRONTEND  the folder that has cudnn_frontend.h, where no wheel has it
#   FLASH_ATTN  auto (for the GPUs here: 4 on 9.0, 1 on 8.x and 12.x, else none; with CUDA_ARCH=all
#             "1 4"; default) | 0: none
#           | 1: fetch flash-attn's source and compile its kernels: attention for GPUs before 9.0
#             (minutes)
#           | 4: fetch flash-attn-4 and NVIDIA's compiler for it: faster attention for GPUs of 9.0
#             (2 minutes; CUDA 12.8 or newer, x86-64)
#           | "1 4": both
#   NVCCFLAGS  yours, added behind the project's own
#   FLASH_JOBS  flash-attn's kernels to compile at a time (default: one for each 6 GB that are free)
#   PREFIX, DESTDIR  where make install puts the command, library and headers (default: /usr/local),
#           and the folder below which it does so for a package of a distribution (default: none)
#   V       0: a short line a file (default) | 1: the commands
#   SAN     thread | address,undefined: build with sanitizers and asserts (use another BUILD)
#   DEBUG   0 (default): without asserts | 1: with asserts, -O0 -g unless you give CFLAGS (use
#           another BUILD)
# What was built with other settings in the same BUILD is built again.

# The other files: native/build.mk compiles and links, native/cuda.mk adds what CUDA needs,
# python/python.mk makes environments and takes libraries out of wheels.
BUILD ?= build
VENV ?= $(BUILD)/venv
VENV_TEST ?= $(VENV)-test
PYTHON ?= python3
BLAS ?= wheel
CUDA ?= auto
ARCHS ?= 89 120
CUDNN ?= 1
FLASH_ATTN ?= auto
V ?= 0
DEBUG ?= 0
PREFIX ?= /usr/local
CFLAGS ?= $(if $(filter 1,$(DEBUG)),-O0 -g,-O2 -g)
CXXFLAGS ?= -O1

NVCC := $(firstword $(if $(CUDA_HOME),$(wildcard $(CUDA_HOME)/bin/nvcc),\
          $(realpath $(shell command -v nvcc)) $(wildcard /usr/local/cuda/bin/nvcc)))
# A demo where nvcc is found and no GPU is built for the CPU, beside what make builds with CUDA,
# which stays as it is.
ifeq ($(filter-out demo demo-chat,$(or $(MAKECMDGOALS),all))$(CUDA),auto)
ifeq ($(wildcard $(BUILD)/lib/libpenstock.so)$(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),)
ifneq ($(NVCC),)
$(info no GPU here: the demo is built for the CPU in $(BUILD)/cpu, without NVIDIA's libraries \
  (CUDA=1: with them))
override VENV := $(VENV)
override BUILD := $(BUILD)/cpu
override CUDA := 0
endif
endif
endif

# The folder of the checkout may have spaces in its path: nothing here needs it.
$(foreach v,BUILD VENV VENV_TEST CUDA_HOME,$(if $(word 2,$($v)),$(error \
  $v="$($v)" has a space in it, which make cannot handle: choose another $v)))

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.PHONY: FORCE all lib help format native-tests fuzz-programs bench-programs cuda-archs venv \
  venv-test python wheel lock demo demo-chat test test-long test-oldest golden test-gpu \
  test-sanitize clean venv-package install uninstall
FORCE:

include native/build.mk
include python/python.mk

all: $(LIB) $(BIN) $(CDEF) ## the library libpenstock and the binary penstock
lib: $(LIB) $(CDEF) ## the library only, and its declarations for Python
native-tests: $(NATIVE_TESTS) ## build the native test programs
fuzz-programs: $(FUZZ_BIN) ## build the fuzz targets (tests/fuzz/driver.c: how to run them longer)
bench-programs: $(BENCH_BIN) ## build the native benchmark programs
cuda-archs: $(ARCHS_OBJ) ## compile the kernels for other GPUs, and link nothing (ARCHS="89 120")
venv: $(VENV)/.done-requirements-runtime.txt ## the Python environment the demo needs
venv-test: $(VENV_TEST)/.done-references ## another one with the tests' references

DEMO = @PENSTOCK_BUILD="$(abspath $(BUILD))" PYTHONPATH=python $(VENV)/bin/python -m
demo: all venv ## train a small model on Python's sources under two memory caps (TEXT="files")
	$(DEMO) penstock.demo --build "$(BUILD)" $(if $(TEXT),--text $(TEXT)) $(DEMO_ARGS)
demo-chat: all venv $(VENV)/.done-requirements-export.txt
demo-chat: ## fine-tune a chat model, 93 MB to download (CHATS="file.jsonl": on your own chats)
	$(DEMO) penstock.demo_chat --build "$(BUILD)" $(if $(CHATS),--chats "$(CHATS)") $(DEMO_ARGS)

PYTEST = PENSTOCK_BUILD="$(BUILD)" PYTHONPATH=python $(VENV_TEST)/bin/python -m pytest -q
# One process a CPU, at most four: a test's own threads and memory come on top.
PYTEST_PARALLEL := -n auto --maxprocesses=4 --dist loadgroup --no-loadscope-reorder
test: all native-tests bench-programs venv-test
test: ## all tests but the long ones (TESTS="files or options of pytest")
	$(PYTEST) $(PYTEST_PARALLEL) $(or $(TESTS),tests)
test-long: all native-tests venv venv-test
test-long: ## the tests that take minutes, and all that sanitizers can run (TESTS="...": some tests)
	$(PYTEST) -m long $(or $(TESTS),tests)
	@$(if $(TESTS),,VENV="$(VENV)" VENV_TEST="$(VENV_TEST)" BUILD="$(BUILD)" SANITIZE=all \
	  tests/sanitize.sh)
test-oldest: all native-tests $(BUILD)/oldest/.done ## tests with the oldest transformers
	PENSTOCK_BUILD="$(BUILD)" PYTHONPATH="$(BUILD)/oldest:python" $(VENV_TEST)/bin/python -m pytest \
	  -q -n auto --maxprocesses=4 -m oldest $(or $(TESTS),$$(grep -l 'mark[.]oldest' tests/*.py))
golden: all native-tests venv-test ## write tests/golden anew, in a commit of its own that says why
	$(PYTEST) -m "long or not long" --write-golden tests/test_golden.py
GPU_TESTS := tests/test_native.py tests/test_cuda_bad_input.py tests/gpu
test-gpu: all native-tests venv-test ## what needs a GPU; without one it says why and skips
	$(PYTEST) -rs -m "gpu and not long" $(GPU_TESTS)
	@PENSTOCK_BUILD="$(BUILD)" PYTHON="$(VENV_TEST)/bin/python" \
	 tests/gpu/run.sh sanitizers || [ $$? = 77 ]
test-sanitize: venv venv-test ## native tests and a training under ThreadSanitizer and ASan + UBSan
	@VENV="$(VENV)" VENV_TEST="$(VENV_TEST)" BUILD="$(BUILD)" tests/sanitize.sh

PACKAGE = PENSTOCK_INSTALL_BUILD="$(BUILD)" $(VENV)/bin/python -m \
  pip --quiet --disable-pip-version-check
python: all venv-package ## install the Python package into $(VENV)
	$(PACKAGE) install --no-build-isolation --no-deps --force-reinstall ./python
INSTALL_LISTS := python/requirements-runtime.txt $(INSTALL_CUDA)
install: all venv-package ## the command penstock, library and headers below PREFIX (and DESTDIR)
	@rm -rf $(BUILD)/wheel/install
	$(PACKAGE) wheel --no-build-isolation --no-deps --wheel-dir $(BUILD)/wheel/install ./python
	@python/install.sh "$(PREFIX)" "$(DESTDIR)" $(BUILD)/wheel/install/*.whl "$(PYTHON)" \
	 $(INSTALL_LISTS)
uninstall: ## take away what make install wrote below PREFIX (and DESTDIR)
	@python/install.sh --remove "$(PREFIX)" "$(DESTDIR)"
wheel: all venv-package ## a wheel with the library in $(BUILD)/dist (CUDA_ARCH=all: any GPU)
	@rm -rf $(BUILD)/dist $(BUILD)/wheel/dist; mkdir -p $(BUILD)/dist
	$(PACKAGE) wheel --no-build-isolation --no-deps --wheel-dir $(BUILD)/wheel/dist ./python
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m auditwheel repair \
	 -w $(BUILD)/dist $(BUILD)/wheel/dist/*.whl >$(BUILD)/wheel/log 2>&1 || \
	 { cat $(BUILD)/wheel/log; exit 1; }
	@ls $(BUILD)/dist/*.whl

CLANG_FILES = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp')
format: venv-test ## lay out all sources as .clang-format and .ruff.toml say
	@$(VENV_TEST)/bin/clang-format -i $(CLANG_FILES)
	@$(VENV_TEST)/bin/ruff check --quiet --fix . ; $(VENV_TEST)/bin/ruff format --quiet .
lock: $(BUILD)/venv-lock/.done-requirements-lock.txt
lock: ## write python/requirements-*.txt anew from the .in files (LOCK_ARGS="--upgrade")
	@PATH="$(abspath $(BUILD))/venv-lock/bin:$$PATH" $(BUILD)/venv-lock/bin/python python/lock.py \
	 $(LOCK_ARGS)
clean: ## remove objects, library and binary; keep the environment
	rm -rf $(addprefix $(BUILD)/,cpu obj bin tests fuzz bench) $(LIB) $(ARCHIVE) $(CDEF)
help: ## this list
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile
	@grep -hE '^[a-z][a-z-]*:.*## ' Makefile | sort | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
	 awk -F'|' '{printf "  make %-17s %s\n", $$1, $$2}'
