/* The driver API: what Triton's launcher, Inductor and torch's lazy driver bindings call. */
#include "nullgpu.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char the_context; /* one primary context; only its address is used */

EXPORT CUresult cuInit(unsigned flags) { (void)flags; return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    (void)device;
    snprintf(name, room, "%s", ng_device->name);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = ng_device->total_bytes;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    (void)device;
    *context = (CUcontext)&the_context;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&the_context; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { (void)context; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext context) { (void)context; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxGetCurrent(context); }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { (void)limit; *value = 1024; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { (void)limit, (void)value; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSynchronize(void) { return (CUresult)cudaDeviceSynchronize(); }
/* Stream-capture errors have the same numbers in both APIs, so one table serves. */
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* ---- modules and functions: the binary is not looked at, only the names asked for are kept */
struct function { char name[240]; };

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    (void)image;
    *module = calloc(1, sizeof(char *));
    ng_log("module_load", "api=driver");
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *option, void **value) {
    (void)n, (void)option, (void)value;
    return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
EXPORT CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    (void)module;
    struct function *function = calloc(1, sizeof *function);
    snprintf(function->name, sizeof function->name, "%s", name);
    *out = (CUfunction)function;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    (void)function;
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    (void)function, (void)which, (void)value;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    (void)function, (void)config;
    return CUDA_SUCCESS;
}

/* ---- launches */
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **args,
                               void **extra) {
    (void)args, (void)extra;
    if ((int)shared > ng_device->shared_optin) return CUDA_ERROR_INVALID_VALUE;
    ng_submit(stream, "launch", "api=driver\tname=%s\tgrid=%u,%u,%u\tblock=%u,%u,%u\tshared=%u",
              ((const struct function *)function)->name, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                          CUstream stream, void **args) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, args, NULL);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **args, void **extra) {
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                          config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, args, extra);
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                            size_t shared) {
    (void)function, (void)threads, (void)shared;
    *blocks = 2;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    (void)function, (void)config;
    *clusters = 8;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *at,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill) {
    (void)type, (void)at, (void)sizes, (void)strides, (void)steps, (void)interleave, (void)swizzle, (void)promotion;
    (void)fill;
    memset(map, 0, sizeof *map);
    ng_log("tensor_map", "rank=%u\tbox=%u,%u", rank, box[0], rank > 1 ? box[1] : 0);
    return CUDA_SUCCESS;
}

/* torch fetches driver functions by name. One we lack must fail when called, not when looked up. */
static CUresult not_modelled(void) {
    ng_stub("driver function taken by cudaGetDriverEntryPointByVersion");
    return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    (void)version, (void)flags;
    char newest[96]; /* the plain name of some functions stands for their second version */
    snprintf(newest, sizeof newest, "%s_v2", symbol);
    void *found = dlsym(RTLD_DEFAULT, newest);
    if (!found) found = dlsym(RTLD_DEFAULT, symbol);
    if (!found) ng_log("entry_point_missing", "name=%s", symbol);
    *function = found ? found : (void *)not_modelled;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
