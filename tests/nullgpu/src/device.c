/* One device: what it says about itself, and the last error. Figures: vendor data sheets and the CUDA guide's table of
   compute capabilities. They shape decisions of torch and Triton (tile sizes, occupancy); nothing is timed with them. */
#include "nullgpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KIB 1024
#define MIB (1024 * KIB)
#define GIB ((size_t)1024 * MIB)

static const struct ng_device known[] = {
    {80, 108, 163 * KIB, 164 * KIB, 40 * MIB, 5120, 1410000, 1593000, 80 * GIB, "NVIDIA A100 (null GPU)"},
    {90, 132, 227 * KIB, 228 * KIB, 50 * MIB, 6144, 1980000, 3201000, 141 * GIB, "NVIDIA H200 (null GPU)"},
    {100, 148, 227 * KIB, 228 * KIB, 126 * MIB, 8192, 1965000, 3996000, 180 * GIB, "NVIDIA B200 (null GPU)"},
};
const struct ng_device *ng_device = &known[1];
static __thread cudaError_t last_error = cudaSuccess;

void ng_select_device(int cc) {
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].cc == cc) {
            ng_device = &known[i];
            return;
        }
    fprintf(stderr, "nullgpu: no device of compute capability %d; known: 80, 90, 100\n", cc);
    _exit(86);
}

cudaError_t ng_fail(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct { cudaError_t error; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a "
                                                       "capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};
EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].name;
    return "cudaErrorUnknown";
}
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].text;
    return "unknown null GPU error";
}

/* The driver API numbers its attributes as the runtime does. */
static int attribute(int which) {
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return ng_device->cc / 10;
    case cudaDevAttrComputeCapabilityMinor: return ng_device->cc % 10;
    case cudaDevAttrMultiProcessorCount: return ng_device->sms;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * KIB;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return ng_device->shared_optin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return ng_device->shared_sm;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return ng_device->clock_khz;
    case cudaDevAttrMemoryClockRate: return ng_device->memory_khz;
    case cudaDevAttrGlobalMemoryBusWidth: return ng_device->bus_bits;
    case cudaDevAttrL2CacheSize: return ng_device->l2_bytes;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0;
    }
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    if (device != 0) return ng_fail(cudaErrorInvalidDevice);
    *value = attribute(which);
    return cudaSuccess;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute((int)which);
    return CUDA_SUCCESS;
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device != 0) return ng_fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", ng_device->name);
    p->major = ng_device->cc / 10;
    p->minor = ng_device->cc % 10;
    p->totalGlobalMem = ng_device->total_bytes;
    p->multiProcessorCount = ng_device->sms;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = 48 * KIB;
    p->sharedMemPerBlockOptin = ng_device->shared_optin;
    p->sharedMemPerMultiprocessor = ng_device->shared_sm;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = ng_device->l2_bytes;
    p->memoryBusWidth = ng_device->bus_bits;
    p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = p->streamPrioritiesSupported = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : ng_fail(cudaErrorInvalidDevice); }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
    if (lowest) *lowest = 0;
    if (highest) *highest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
    (void)device;
    snprintf(text, room, "0000:00:00.0");
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = ng_unsafe_call("cudaDeviceSynchronize");
    if (error == cudaSuccess) ng_log("sync", "what=device");
    return error;
}
