/* Shared internals of the stand-in CUDA runtime and driver: the event log, submitted work, capture state. */
#ifndef NULLGPU_H
#define NULLGPU_H
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include "cuda.h"
#include "cuda_runtime_api.h"

#define EXPORT __attribute__((visibility("default")))
#define PRINTF_LIKE(fmt, first) __attribute__((format(printf, fmt, first)))

/* ---- log.c: one event a line, "kind<TAB>key=value<TAB>...", written at once so that a crash loses nothing */
void ng_log(const char *kind, const char *fmt, ...) PRINTF_LIKE(2, 3);
void ng_stub(const char *symbol);       /* called by generated stubs: a function we do not model was used */
void ng_lock(void);                     /* one recursive lock around all state */
void ng_unlock(void);

/* ---- device.c */
struct ng_device {
    int cc, sms, shared_optin, shared_sm, l2_bytes, bus_bits, clock_khz, memory_khz;
    size_t total_bytes;
    const char *name;
};
extern const struct ng_device *ng_device;
void ng_select_device(int cc);          /* ends the process for a compute capability without a row */
cudaError_t ng_fail(cudaError_t error); /* remembers a non-zero error for cudaGetLastError, returns it */

/* ---- stream.c */
struct ng_ints { int *at, n, room; };   /* a small set of node indices */
void ng_ints_add(struct ng_ints *set, int value);
void ng_ints_copy(struct ng_ints *to, const struct ng_ints *from);

struct ng_capture;
struct ng_stream {
    int id;                             /* 0 is the default stream; what the log shows */
    int priority, destroyed;
    struct ng_capture *capture;         /* live capture this stream takes part in, or NULL */
    struct ng_ints tips;                /* nodes the next captured node depends on */
    struct ng_stream *next;
};
extern struct ng_stream ng_default_stream;
struct ng_stream *ng_stream_of(cudaStream_t handle);

/* All asynchronous work comes through here. Returns 1 if it became a node of a live capture: the caller must then
   not execute it. Otherwise it counts as executed and the virtual clock moves on. `kind` must be a string literal. */
int ng_submit(cudaStream_t stream, const char *kind, const char *fmt, ...) PRINTF_LIKE(3, 4);
double ng_clock_ms(void);               /* virtual time: one millisecond for each piece of executed work */
void ng_clock_advance(int works);

/* ---- capture.c */
struct ng_node { const char *kind; struct ng_ints deps; };
struct ng_graph { struct ng_node *node; int n, room, kernels; };
struct ng_capture {
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    long thread;
    struct ng_stream *origin;
    struct ng_graph *graph;
    int invalid;
};
int ng_graph_add(struct ng_graph *graph, const char *kind, const struct ng_ints *deps);
unsigned long long ng_live_capture(void);                           /* id of a capture live in the process, else 0 */
struct ng_capture *ng_capture_by_id(unsigned long long id);         /* NULL once it has ended */
/* Marks `capture` (or, if NULL, every live capture) invalid, logs the violation, returns `error`. */
cudaError_t ng_violation(struct ng_capture *capture, cudaError_t error, const char *what);
/* For calls that CUDA forbids while a capture is live (cudaMalloc, synchronous copies, device-wide waits). */
cudaError_t ng_unsafe_call(const char *what);

struct blas;
int ng_blas(const char *routine, const struct blas *handle); /* blas.c: called by generated stubs */

/* ---- memory.c */
int ng_is_device_pointer(const void *pointer);
#endif
