// Walks a simulated machine: for each line "MILLISECONDS LOST THREADS" of the input, graphs that take a millisecond, in which
// a thread that is not alone has no CPU for LOST of 100 parts, are computed until so much time has passed. Prints for each line
// how many graphs each number of threads has computed, as "THREADS:GRAPHS".

#include "fewer_threads.h"

#include <cstdio>
#include <map>

int main() {
    mtp::fewer_threads threads;
    long now = 0, milliseconds, lost;
    int n;
    while (scanf("%ld %ld %d", &milliseconds, &lost, &n) == 3) {
        std::map<int, int> graphs;
        for (const long until = now + 1000 * milliseconds; now < until;) {
            const int used = threads.begin(now, n);
            now += 1000;
            graphs[used]++;
            if (used > 1) {
                threads.end(now, 10 * lost);
            }
        }
        for (const auto & [used, count] : graphs) {
            printf("%d:%d ", used, count);
        }
        printf("\n");
    }
}
