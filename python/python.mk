# Environments of Python, each from a list of pinned packages, and the libraries that come out of
# their wheels. The Makefile includes this.

$(VENV)/.done-%: python/% python/bootstrap.sh
	@python/bootstrap.sh $(VENV) python/$* "$(PYTHON)"
$(BUILD)/venv-lock/.done-%: python/% python/bootstrap.sh
	@python/bootstrap.sh $(BUILD)/venv-lock python/$* "$(PYTHON)"
$(VENV_TEST)/.done-%: python/% python/bootstrap.sh
	@python/bootstrap.sh $(VENV_TEST) python/$* "$(PYTHON)"
venv-package: venv $(VENV)/.done-requirements-wheel.txt

# torch's wheel for the CPU alone where it lies on this machine: no index is asked for it.
TORCH_CPU := python/requirements-torch-cpu.txt
TEST_LIST := $(VENV_TEST)/.done-requirements-test.txt
$(TEST_LIST): python/requirements-test.txt $(TORCH_CPU) python/bootstrap.sh
	@PIP_NO_INDEX=1 python/bootstrap.sh $(VENV_TEST) $(TORCH_CPU) "$(PYTHON)" >/dev/null 2>&1 || true
	@python/bootstrap.sh $(VENV_TEST) $< "$(PYTHON)"
# torch comes without its libraries for CUDA; a build of torch that needs them (not every one does)
# gets them.
TORCH_METADATA := $(VENV_TEST)/lib/python3*/site-packages/torch-*.dist-info/METADATA
$(VENV_TEST)/.done-references: $(TEST_LIST) python/requirements-torch.txt
	@! grep -qs '^Requires-Dist:.*nvidia' $(TORCH_METADATA) || \
	 python/bootstrap.sh $(VENV_TEST) python/requirements-torch.txt "$(PYTHON)"
	@touch $@

# Packages of test-oldest, in front of those of $(VENV_TEST).
$(BUILD)/oldest/.done: python/requirements-oldest.txt $(VENV_TEST)/.done-references
	@rm -rf $(BUILD)/oldest
	@$(VENV_TEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --require-hashes --only-binary :all: --target $(BUILD)/oldest -r $<
	@touch $@

# Links beside our library to others that are gone (upgraded, removed): what made them is made
# again.
DANGLING := $(shell find -L '$(BUILD)/lib' -maxdepth 1 -type l 2>/dev/null)
CUDA_LISTS := $(patsubst %,$(VENV)/.done-requirements-%$(CUDA_MAJOR).txt,cuda cudnn)
ifneq ($(DANGLING),)
$(CUBLAS_STAMP) $(CUDNN_STAMP) $(CUDA_LISTS): FORCE
endif

# OpenBLAS out of the pinned wheel: it and what it needs beside our library (found by $ORIGIN),
# headers under $(BUILD)/blas.
BLAS_LIST := $(if $(BLAS_PYTHON),,$(VENV)/.done-requirements-runtime.txt)
$(BUILD)/lib/libscipy_openblas.so: python/find_openblas.py $(BLAS_LIST)
	@"$(or $(BLAS_PYTHON),$(VENV)/bin/python)" $< $(BUILD)/blas $(BUILD)/lib
	@touch $@

# BLAS=system: whether the compiler finds the header.
NO_CBLAS = make: BLAS=system, but $(CC) finds no cblas.h: install OpenBLAS's headers \
  (libopenblas-dev, openblas-devel), or leave BLAS out
$(BUILD)/.done-cblas:
	@mkdir -p $(BUILD)
	@echo '#include <cblas.h>' | $(CC) $(PS_CPPFLAGS) $(CPPFLAGS) $(CFLAGS) -E -x c -o /dev/null - \
	 2>/dev/null || { echo "$(NO_CBLAS)" >&2; exit 1; }
	@touch $@

# cuBLAS out of the pinned wheel of the toolkit's major version.
CUBLAS_LIST := $(if $(CUBLAS_PYTHON),,$(firstword $(CUDA_LISTS)))
$(BUILD)/cublas/cublasLt.h: python/find_cublas.py $(CUBLAS_LIST)
	@rm -f $(DANGLING)
	@"$(or $(CUBLAS_PYTHON),$(VENV)/bin/python)" $< $(CUDA_MAJOR) $(BUILD)/cublas $(BUILD)/lib
	@touch $@

# What an installed package opens at run time.
INSTALL_CUDA := $(if $(filter 1,$(CUDNN)),cudnn,cuda)$(CUDA_MAJOR).txt
INSTALL_CUDA := $(if $(filter 1,$(CUDA)),python/requirements-$(INSTALL_CUDA))

# cuDNN, its frontend and nvrtc.h.
CUDNN_FROM := $(or $(CUDNN_PYTHON),$(if $(CUDNN_HOME),$(PYTHON),$(VENV)/bin/python))
CUDNN_LIST := $(if $(CUDNN_PYTHON)$(CUDNN_HOME),,$(lastword $(CUDA_LISTS)))
CUDNN_WHERE := $(if $(CUDNN_HOME),--home $(CUDNN_HOME)) \
  $(if $(CUDNN_FRONTEND),--frontend $(CUDNN_FRONTEND)) \
  $(if $(wildcard $(CUDA_TOOLKIT)/include/nvrtc.h),--nvrtc $(CUDA_TOOLKIT)/include)
$(BUILD)/cudnn/include/cudnn_frontend.h: python/find_cudnn.py $(CUDNN_LIST)
	@rm -f $(DANGLING)
	@"$(CUDNN_FROM)" $< $(BUILD)/cudnn/include $(BUILD)/lib $(CUDNN_WHERE)
	@touch $@
