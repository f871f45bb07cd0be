/* Fails the calls that a process makes on files of a folder, as a disk or the system may, and counts them: preloaded, it stands
 * before libc. FAILING_FOLDER names the folder, FAILING_FILES a file with the numbers of `control` (failing_files.py), which
 * both sides have mapped. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    _Atomic long open, read, write, list; /* the error of these calls, or 0 */
    _Atomic long opens, stats;            /* calls so far, for a number and by name */
};

static struct control nothing, *control = &nothing;
static const char * folder = "\n";
static _Atomic char inside[4096]; /* whether a descriptor is of a file in the folder */

__attribute__((constructor)) static void find(void) {
    const char * path = getenv("FAILING_FILES");
    const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void * mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(nothing), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED && getenv("FAILING_FOLDER")) {
        control = mapped;
        folder = getenv("FAILING_FOLDER");
    }
}

#define REAL(NAME) ((__typeof__(&NAME)) dlsym(RTLD_NEXT, #NAME))

static int is_inside(const char * path) {
    return path && strncmp(path, folder, strlen(folder)) == 0;
}

static int fails(_Atomic long * error) {
    if (*error) {
        errno = (int) *error;
        return 1;
    }
    return 0;
}

static int noted(int fd, int of_folder) {
    if (fd >= 0 && fd < (int) sizeof(inside)) {
        inside[fd] = (char) of_folder;
    }
    return fd;
}

static int is_noted(int fd) {
    return fd >= 0 && fd < (int) sizeof(inside) && inside[fd];
}

#define OPEN(NAME)                                                        \
    int NAME(const char * path, int flags, ...) {                         \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;   \
        va_end(rest);                                                     \
        const int in = is_inside(path);                                   \
        control->opens += in;                                             \
        if (in && fails(&control->open)) {                                \
            return -1;                                                    \
        }                                                                 \
        return noted(REAL(NAME)(path, flags, mode), in);                  \
    }
OPEN(open)
OPEN(open64)

#define FOPEN(NAME)                                                       \
    FILE * NAME(const char * path, const char * mode) {                   \
        const int in = is_inside(path);                                   \
        control->opens += in;                                             \
        if (in && fails(&control->open)) {                                \
            return NULL;                                                  \
        }                                                                 \
        FILE * file = REAL(NAME)(path, mode);                             \
        if (file) {                                                       \
            noted(fileno(file), in);                                      \
        }                                                                 \
        return file;                                                      \
    }
FOPEN(fopen)
FOPEN(fopen64)

int close(int fd) {
    noted(fd, 0);
    return REAL(close)(fd);
}

int fclose(FILE * file) {
    noted(fileno(file), 0);
    return REAL(fclose)(file);
}

DIR * opendir(const char * path) {
    return is_inside(path) && fails(&control->list) ? NULL : REAL(opendir)(path);
}

#define DATA(NAME, ERROR, PARAMETERS, ARGUMENTS)                          \
    ssize_t NAME PARAMETERS {                                             \
        return is_noted(fd) && fails(&control->ERROR) ? -1 : REAL(NAME) ARGUMENTS; \
    }
DATA(read, read, (int fd, void * to, size_t n), (fd, to, n))
DATA(pread, read, (int fd, void * to, size_t n, off_t at), (fd, to, n, at))
DATA(pread64, read, (int fd, void * to, size_t n, off_t at), (fd, to, n, at))
DATA(write, write, (int fd, const void * from, size_t n), (fd, from, n))
DATA(writev, write, (int fd, const struct iovec * from, int n), (fd, from, n))

#define STAT(NAME, STRUCT)                                                \
    int NAME(const char * path, struct STRUCT * out) {                    \
        control->stats += is_inside(path);                                \
        return REAL(NAME)(path, out);                                     \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
