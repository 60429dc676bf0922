/* Preloaded into a process, this logs every call that changes a file below $TRACE_ROOT, or waits until it is on the
 * disk, and before the call it copies that folder to $TRACE_COPIES/<number>: what a kill at that moment would leave.
 * Calls by C++ libraries are seen too. Of the many calls in arrays and checkpoints every $TRACE_EVERY-th is copied.
 * The log ($TRACE_LOG) has a line "operation<tab>path[<tab>new path]" for each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int number;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
}

static void of_name(int folder, const char *name, char *path) {
    if (name[0] == '/' || folder == AT_FDCWD) {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char base[PATH_MAX];
        of_fd(folder, base);
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) path[0] = 0;
    }
}

/* Holds the mutex if the path is one of those; the call itself follows, then after(). */
static int before(const char *operation, const char *path, const char *other) {
    const char *root = getenv("TRACE_ROOT");
    if (!root || strncmp(path, root, strlen(root))) return 0;
    int kept = errno;
    pthread_mutex_lock(&mutex);
    char copy[PATH_MAX], line[3 * PATH_MAX];
    snprintf(copy, sizeof copy, "%s/%d", getenv("TRACE_COPIES"), number);
    int copied = number++ % atoi(getenv("TRACE_EVERY")) == 0 || !(strstr(path, ".zarr/") || strstr(path, "/checkpoints/"));
    char *arguments[] = {"cp", "-a", (char *)root, copy, NULL};
    char *environment[] = {"PATH=/usr/bin:/bin", NULL};
    pid_t child;
    posix_spawn_file_actions_t quiet;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, 2, "/dev/null", O_WRONLY, 0);
    if (copied && !posix_spawnp(&child, "cp", &quiet, NULL, arguments, environment)) waitpid(child, NULL, 0);
    posix_spawn_file_actions_destroy(&quiet);
    int length = snprintf(line, sizeof line, "%s\t%s%s%s\n", operation, path, other ? "\t" : "", other ? other : "");
    int fd = NEXT(open)(getenv("TRACE_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (NEXT(write)(fd, line, length) != length) abort();
    close(fd);
    errno = kept;
    return 1;
}

static void after(int held) {
    if (held) pthread_mutex_unlock(&mutex);
}

#define ON_FD(type, name, parameters, arguments)                                                                     \
    type name parameters {                                                                                           \
        char path[PATH_MAX];                                                                                         \
        of_fd(fd, path);                                                                                             \
        int held = before(#name, path, NULL);                                                                        \
        type result = NEXT(name) arguments;                                                                          \
        after(held);                                                                                                 \
        return result;                                                                                               \
    }
ON_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))

#define ON_NAME(name, parameters, arguments, folder)                                                                 \
    int name parameters {                                                                                            \
        char path[PATH_MAX];                                                                                         \
        of_name(folder, from, path);                                                                                 \
        int held = before(#name, path, NULL);                                                                        \
        int result = NEXT(name) arguments;                                                                           \
        after(held);                                                                                                 \
        return result;                                                                                               \
    }
ON_NAME(unlink, (const char *from), (from), AT_FDCWD)
ON_NAME(rmdir, (const char *from), (from), AT_FDCWD)
ON_NAME(mkdir, (const char *from, mode_t mode), (from, mode), AT_FDCWD)
ON_NAME(unlinkat, (int at, const char *from, int flags), (at, from, flags), at)
ON_NAME(mkdirat, (int at, const char *from, mode_t mode), (at, from, mode), at)

#define ON_RENAME(name, parameters, arguments, folder, to_folder)                                                    \
    int name parameters {                                                                                            \
        char path[PATH_MAX], other[PATH_MAX];                                                                        \
        of_name(folder, from, path);                                                                                 \
        of_name(to_folder, to, other);                                                                               \
        int held = before("rename", path, other);                                                                    \
        int result = NEXT(name) arguments;                                                                           \
        after(held);                                                                                                 \
        return result;                                                                                               \
    }
ON_RENAME(rename, (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
ON_RENAME(renameat, (int at, const char *from, int to_at, const char *to), (at, from, to_at, to), at, to_at)
ON_RENAME(renameat2, (int at, const char *from, int to_at, const char *to, unsigned flags),
          (at, from, to_at, to, flags), at, to_at)

#define ON_OPEN(name, parameters, arguments, folder)                                                                 \
    int name parameters {                                                                                            \
        mode_t mode = 0;                                                                                             \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                         \
            va_list rest;                                                                                            \
            va_start(rest, flags);                                                                                   \
            mode = va_arg(rest, mode_t);                                                                             \
            va_end(rest);                                                                                            \
        }                                                                                                            \
        char path[PATH_MAX] = "";                                                                                    \
        if (flags & (O_CREAT | O_TRUNC)) of_name(folder, from, path);                                                \
        int held = before("open", path, NULL);                                                                       \
        int result = NEXT(name) arguments;                                                                           \
        after(held);                                                                                                 \
        return result;                                                                                               \
    }
ON_OPEN(open, (const char *from, int flags, ...), (from, flags, mode), AT_FDCWD)
ON_OPEN(open64, (const char *from, int flags, ...), (from, flags, mode), AT_FDCWD)
ON_OPEN(openat, (int at, const char *from, int flags, ...), (at, from, flags, mode), at)
ON_OPEN(openat64, (int at, const char *from, int flags, ...), (at, from, flags, mode), at)
