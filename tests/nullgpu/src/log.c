/* The event log, the big lock, and the start of the library: refuses to load beside a real GPU. */
#include "nullgpu.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REFUSED_EXIT_CODE 86 /* harness.py knows it */

static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

void ng_lock(void) { pthread_mutex_lock(&lock); }
void ng_unlock(void) { pthread_mutex_unlock(&lock); }

void ng_log(const char *kind, const char *fmt, ...) {
    if (log_fd < 0) return;
    char line[1024];
    int used = snprintf(line, sizeof line - 1, "%s\t", kind);
    va_list args;
    va_start(args, fmt);
    int more = vsnprintf(line + used, sizeof line - 1 - used, fmt, args);
    va_end(args);
    used = more < 0 || used + more >= (int)sizeof line - 1 ? (int)sizeof line - 2 : used + more;
    line[used++] = '\n';
    if (write(log_fd, line, used) != used) abort(); /* a log with holes would let tests pass by accident */
}

void ng_stub(const char *symbol) { ng_log("stub", "name=%s", symbol); }

/* Lets a test cut its log into phases. */
EXPORT void nullgpu_mark(const char *label) { ng_log("mark", "label=%s", label); }

static void refuse(const char *found) {
    fprintf(stderr, "nullgpu: refusing to load: %s says that this machine has a real NVIDIA GPU\n", found);
    _exit(REFUSED_EXIT_CODE);
}

static void refuse_beside_a_real_gpu(void) {
    static const char *const signs[] = {"/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"};
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (access(signs[i], F_OK) == 0) refuse(signs[i]);
    const char *extra = getenv("NULLGPU_EXTRA_SIGN"); /* only ever adds a sign: lets a test see the refusal */
    if (extra && access(extra, F_OK) == 0) refuse(extra);
}

__attribute__((constructor)) static void start(void) {
    refuse_beside_a_real_gpu();
    const char *cc = getenv("NULLGPU_CC");
    ng_select_device(cc ? atoi(cc) : 90);
    const char *path = getenv("NULLGPU_LOG");
    if (!path) return;
    log_fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log_fd < 0) {
        perror("nullgpu: cannot open NULLGPU_LOG");
        _exit(REFUSED_EXIT_CODE);
    }
}
