/* Device and pinned memory: real address space, host-backed and lazy, so that torch's caching allocator works as ever.
   Copies up to COPY_LIMIT are carried out, since programs route sizes and indices through the device; a kernel writes
   nothing, so contents mean nothing. */
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULE ((size_t)2 << 20)     /* cudaMalloc aligns large blocks to 2 MiB */
#define COPY_LIMIT ((size_t)64 << 20) /* larger copies would only touch pages */

struct block { char *start; size_t bytes; void *mapped; size_t mapped_bytes; };
struct blocks { struct block *at; size_t n, room; };
static struct blocks on_device, on_host;
static size_t used_bytes, peak_bytes;

static void add_block(struct blocks *list, struct block block) {
    if (list->n == list->room) {
        list->room = list->room ? 2 * list->room : 256;
        list->at = realloc(list->at, list->room * sizeof *list->at);
    }
    list->at[list->n++] = block;
}

static int contains(const struct blocks *list, const void *pointer) {
    int found = 0;
    ng_lock();
    for (size_t i = 0; i < list->n && !found; i++)
        found = (const char *)pointer >= list->at[i].start && (const char *)pointer < list->at[i].start + list->at[i].bytes;
    ng_unlock();
    return found;
}
int ng_is_device_pointer(const void *pointer) { return contains(&on_device, pointer); }

/* Returns the bytes freed, 0 if `pointer` is not the start of a block. */
static size_t remove_block(struct blocks *list, const void *pointer) {
    size_t bytes = 0;
    ng_lock();
    for (size_t i = 0; i < list->n; i++)
        if (list->at[i].start == pointer) {
            bytes = list->at[i].bytes;
            munmap(list->at[i].mapped, list->at[i].mapped_bytes);
            list->at[i] = list->at[--list->n];
            break;
        }
    ng_unlock();
    return bytes;
}

static void *map_block(struct blocks *list, size_t bytes, size_t alignment) {
    size_t rounded = (bytes + alignment - 1) / alignment * alignment, mapped_bytes = rounded + alignment;
    void *mapped = mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) abort();
    char *start = (char *)(((uintptr_t)mapped + alignment - 1) / alignment * alignment);
    add_block(list, (struct block){start, rounded, mapped, mapped_bytes});
    return start;
}

static void *allocate_device(size_t bytes) {
    size_t rounded = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    void *start = NULL;
    ng_lock();
    if (used_bytes + rounded <= ng_device->total_bytes) {
        used_bytes += rounded;
        if (used_bytes > peak_bytes) peak_bytes = used_bytes;
        start = map_block(&on_device, rounded, GRANULE);
    }
    ng_unlock();
    return start;
}

static int free_device(void *pointer) {
    ng_lock();
    size_t bytes = remove_block(&on_device, pointer);
    used_bytes -= bytes;
    ng_unlock();
    return bytes != 0;
}

/* ---- allocation */
EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    cudaError_t error = ng_unsafe_call("cudaMalloc");
    if (error) return error;
    *pointer = allocate_device(bytes);
    ng_log("malloc", "bytes=%zu\tok=%d\tused=%zu", bytes, *pointer != NULL, used_bytes);
    return *pointer ? cudaSuccess : ng_fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaFree(void *pointer) {
    if (!pointer) return cudaSuccess;
    cudaError_t error = ng_unsafe_call("cudaFree");
    if (error) return error;
    if (!free_device(pointer)) return ng_fail(cudaErrorInvalidValue);
    ng_log("free", "used=%zu", used_bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    *pointer = allocate_device(bytes);
    if (!*pointer) return ng_fail(cudaErrorMemoryAllocation);
    ng_submit(stream, "malloc_async", "bytes=%zu", bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    if (!ng_submit(stream, "free_async", "bytes=0") && !free_device(pointer)) return ng_fail(cudaErrorInvalidValue);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = ng_device->total_bytes;
    *free_bytes = ng_device->total_bytes - used_bytes;
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    cudaError_t error = ng_unsafe_call("cudaHostAlloc");
    if (error) return error;
    ng_lock();
    *pointer = map_block(&on_host, bytes ? bytes : 1, 4096);
    ng_unlock();
    return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void *pointer) {
    if (!pointer) return cudaSuccess;
    cudaError_t error = ng_unsafe_call("cudaFreeHost");
    if (error) return error;
    return remove_block(&on_host, pointer) ? cudaSuccess : ng_fail(cudaErrorInvalidValue);
}
EXPORT void nullgpu_memory(size_t *used, size_t *peak) {
    *used = used_bytes;
    *peak = peak_bytes;
}

/* ---- copies */
static void copy(void *to, const void *from, size_t bytes) {
    if (bytes <= COPY_LIMIT) memmove(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    if (!ng_submit(stream, "memcpy", "direction=%d\tbytes=%zu", kind, bytes)) copy(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                       cudaStream_t stream) {
    (void)to_device, (void)from_device;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (!ng_submit(stream, "memcpy", "direction=%d\tbytes=%zu", kind, width * height))
        for (size_t row = 0; row < height && width * height <= COPY_LIMIT; row++)
            memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    cudaError_t error = ng_unsafe_call("cudaMemcpy");
    if (error) return error;
    ng_log("sync", "what=memcpy\tdirection=%d\tbytes=%zu", kind, bytes);
    copy(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    if (!ng_submit(stream, "memset", "bytes=%zu", bytes) && bytes <= COPY_LIMIT) memset(at, value, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, NULL); }

/* ---- pointer queries */
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    memset(out, 0, sizeof *out);
    int device = contains(&on_device, pointer), host = !device && contains(&on_host, pointer);
    out->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->devicePointer = device || host ? (void *)pointer : NULL;
    out->hostPointer = host ? (void *)pointer : NULL;
    return cudaSuccess;
}
EXPORT CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr pointer) {
    int device = contains(&on_device, (void *)pointer), host = !device && contains(&on_host, (void *)pointer);
    if (!device && !host) return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)out = pointer;
    else if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)out = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else if (which == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext *)out = NULL;
    else *(int *)out = 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *which, void **out, CUdeviceptr pointer) {
    for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(out[i], which[i], pointer);
    return CUDA_SUCCESS;
}
/* Device-side globals have no content here: one zeroed area stands for all of them. */
EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char area[1 << 16];
    (void)symbol;
    *pointer = area;
    return cudaSuccess;
}
