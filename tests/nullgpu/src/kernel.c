/* Kernels that do nothing, registered at load and launched by the runtime API: torch's own. Triton's: driver.c. */
#include "nullgpu.h"
#include <string.h>

/* ---- registration by compiled CUDA code: host function -> mangled name, kept in a hash table */
#define SLOTS (1u << 18) /* torch registers some 30,000 kernels */
static struct { const void *host; const char *name; } slots[SLOTS];

static unsigned slot_of(const void *host) {
    unsigned i = (unsigned)(((uintptr_t)host >> 4) * 2654435761u) % SLOTS;
    while (slots[i].host && slots[i].host != host) i = (i + 1) % SLOTS;
    return i;
}
EXPORT void __cudaRegisterFunction(void **module, const char *host, char *device, const char *name, int limit, uint3 *a,
                                   uint3 *b, dim3 *c, dim3 *d, int *e) {
    (void)module, (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
    ng_lock();
    unsigned i = slot_of(host);
    slots[i].host = host;
    slots[i].name = name;
    ng_unlock();
}
EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *module[4];
    (void)binary;
    return module;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **module) { (void)module; }
EXPORT void __cudaUnregisterFatBinary(void **module) { (void)module; }
EXPORT void __cudaRegisterVar(void **module, char *host, char *device, const char *name, int external, size_t bytes,
                              int constant, int global) {
    (void)module, (void)host, (void)device, (void)name, (void)external, (void)bytes, (void)constant, (void)global;
}

/* ---- launches by the runtime API */
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } pushed;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared,
                                    cudaStream_t stream) {
    (void)args;
    const char *name = slots[slot_of(host)].name;
    ng_submit(stream, "launch", "api=runtime\tname=%.300s\tgrid=%u,%u,%u\tblock=%u,%u,%u\tshared=%zu",
              name ? name : "unregistered", grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared,
                                               cudaStream_t stream) {
    return cudaLaunchKernel(host, grid, block, args, shared, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **args) {
    return cudaLaunchKernel(host, config->gridDim, config->blockDim, args, config->dynamicSmemBytes, config->stream);
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                      cudaStream_t stream) {
    return cudaLaunchKernel((const void *)kernel, grid, block, args, shared, stream);
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    if (!ng_submit(stream, "host_function", "api=runtime")) function(data);
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *host) {
    (void)host;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = ng_device->cc;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads,
                                                                          size_t shared, unsigned flags) {
    (void)host, (void)threads, (void)shared, (void)flags;
    *blocks = 2;
    return cudaSuccess;
}
