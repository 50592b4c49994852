/* Streams, events, submitted work, virtual time. Work finishes at once, so a wait outside a capture never blocks. */
#include "nullgpu.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void ng_ints_add(struct ng_ints *set, int value) {
    for (int i = 0; i < set->n; i++)
        if (set->at[i] == value) return;
    if (set->n == set->room) {
        set->room = set->room ? 2 * set->room : 4;
        set->at = realloc(set->at, set->room * sizeof *set->at);
    }
    set->at[set->n++] = value;
}
void ng_ints_copy(struct ng_ints *to, const struct ng_ints *from) {
    to->n = 0;
    for (int i = 0; i < from->n; i++) ng_ints_add(to, from->at[i]);
}

/* ---- streams: a handle is the address of its struct, which is kept after destruction so that misuse is seen */
struct ng_stream ng_default_stream;
static int last_stream_id;

struct ng_stream *ng_stream_of(cudaStream_t handle) {
    if (handle == NULL || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return &ng_default_stream;
    return (struct ng_stream *)handle;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    (void)flags;
    struct ng_stream *stream = calloc(1, sizeof *stream);
    ng_lock();
    stream->id = ++last_stream_id;
    stream->priority = priority;
    stream->next = ng_default_stream.next;
    ng_default_stream.next = stream;
    ng_unlock();
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    ng_stream_of(handle)->destroyed = 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    *priority = ng_stream_of(handle)->priority;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    struct ng_capture *capture = ng_stream_of(handle)->capture;
    if (capture) return ng_violation(capture, cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
    return handle == NULL ? ng_unsafe_call("cudaStreamQuery(default stream)") : cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    struct ng_stream *stream = ng_stream_of(handle);
    if (stream->capture)
        return ng_violation(stream->capture, cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
    cudaError_t error = stream->id == 0 ? ng_unsafe_call("cudaStreamSynchronize(default stream)") : cudaSuccess;
    if (error == cudaSuccess) ng_log("sync", "what=stream\tstream=%d", stream->id);
    return error;
}
EXPORT CUresult cuStreamSynchronize(CUstream handle) { return (CUresult)cudaStreamSynchronize(handle); }

/* ---- submitted work and virtual time */
static long works_done;

void ng_clock_advance(int works) { __atomic_add_fetch(&works_done, works, __ATOMIC_RELAXED); }
double ng_clock_ms(void) { return (double)__atomic_load_n(&works_done, __ATOMIC_RELAXED); }

int ng_submit(cudaStream_t handle, const char *kind, const char *fmt, ...) {
    char text[768];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    struct ng_stream *stream = ng_stream_of(handle);
    ng_lock();
    struct ng_capture *capture = stream->capture;
    if (stream->destroyed) ng_violation(NULL, cudaErrorInvalidResourceHandle, "work on a destroyed stream");
    if (capture) {
        int node = ng_graph_add(capture->graph, kind, &stream->tips);
        stream->tips.n = 0;
        ng_ints_add(&stream->tips, node);
    } else {
        ng_clock_advance(1);
    }
    /* beside: executed now although a capture is live somewhere, so it will not be replayed */
    ng_log(kind, "stream=%d\tcapture=%llu\tbeside=%llu\t%s", stream->id, capture ? capture->id : 0,
           capture ? 0 : ng_live_capture(), text);
    ng_unlock();
    return capture != NULL;
}

/* ---- events */
struct event { unsigned long long capture_id; struct ng_ints tips; int recorded, stream_id; double ms; };

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    (void)flags;
    *handle = (cudaEvent_t)calloc(1, sizeof(struct event));
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    free(((struct event *)handle)->tips.at);
    free(handle);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
    struct event *event = (struct event *)handle;
    struct ng_stream *stream = ng_stream_of(stream_handle);
    if (stream->capture && (flags & cudaEventRecordExternal)) {
        ng_submit(stream_handle, "event_record", "external=1");
        return cudaSuccess;
    }
    ng_lock();
    event->recorded = 1;
    event->stream_id = stream->id;
    event->capture_id = stream->capture ? stream->capture->id : 0;
    event->ms = ng_clock_ms();
    ng_ints_copy(&event->tips, &stream->tips);
    ng_unlock();
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    return cudaEventRecordWithFlags(handle, stream, 0);
}
static cudaError_t check_event(const struct event *event, const char *what) {
    if (!event->capture_id) return cudaSuccess;
    return ng_violation(ng_capture_by_id(event->capture_id), cudaErrorCapturedEvent, what);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) { return check_event((struct event *)handle, "cudaEventQuery"); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    cudaError_t error = check_event((struct event *)handle, "cudaEventSynchronize");
    if (error == cudaSuccess) ng_log("sync", "what=event");
    return error;
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    double elapsed = ((struct event *)end)->ms - ((struct event *)start)->ms;
    *ms = elapsed > 0 ? (float)elapsed : 1e-3f; /* dividing by a measured time must not divide by zero */
    return cudaSuccess;
}

/* A stream joins a capture by waiting for an event recorded in it; the capturing stream takes the work of another back
   in the same way. Every other mixture is an error, as on a real device. */
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
    struct event *event = (struct event *)event_handle;
    struct ng_stream *stream = ng_stream_of(handle);
    cudaError_t error = cudaSuccess;
    ng_lock();
    struct ng_capture *theirs = event->capture_id ? ng_capture_by_id(event->capture_id) : NULL;
    if (!event->recorded || (flags & cudaEventWaitExternal)) {
        /* waiting for an event that was never recorded is defined to do nothing */
    } else if (event->capture_id && !theirs) {
        error = ng_violation(stream->capture, cudaErrorCapturedEvent, "wait for an event of a capture that has ended");
    } else if (stream->capture && !theirs) {
        error = ng_violation(stream->capture, cudaErrorStreamCaptureIsolation, "wait for an event outside the capture");
    } else if (theirs && stream->capture && stream->capture != theirs) {
        error = ng_violation(stream->capture, cudaErrorStreamCaptureMerge, "wait for an event of another capture");
    } else if (theirs) {
        if (!stream->capture) {
            stream->capture = theirs;
            stream->tips.n = 0;
            ng_log("capture_join", "stream=%d\tcapture=%llu", stream->id, theirs->id);
        }
        for (int i = 0; i < event->tips.n; i++) ng_ints_add(&stream->tips, event->tips.at[i]);
    } else if (event->stream_id != stream->id) {
        ng_log("wait", "stream=%d\ton=%d", stream->id, event->stream_id);
    }
    ng_unlock();
    return error;
}
