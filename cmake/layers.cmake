# add_layer(NAME FOLDER f [USES layer…] [LIBS target…])
#
# A static library of all sources directly in FOLDER and in its folders cpu/, cuda/ (backends), sinks/, pipeline/ and dispatch/. Its include root is a
# build-tree folder that holds one link to FOLDER and nothing else, so an #include of a layer that is not in USES does
# not compile. LIBS are private: no header of a layer shows a third-party header to the layers above.
# CUDA_OR_ABSENT in LIBS: with CUDA the sources in cuda/ are compiled and the toolkit is linked, without it
# *_absent.cpp takes their place. NCCL_OR_ABSENT: the same for sources that need CUDA and NCCL; UNICODE_OR_ABSENT: for the
# sources in unicode/, which need PCRE2 and utf8proc.
function(add_layer name)
  cmake_parse_arguments(L "" "FOLDER" "USES;LIBS" ${ARGN})
  set(root ${CMAKE_BINARY_DIR}/layers/${name})
  get_filename_component(parent ${L_FOLDER} DIRECTORY)
  file(MAKE_DIRECTORY ${root}/${parent})
  if(NOT EXISTS ${root}/${L_FOLDER})
    file(CREATE_LINK ${CMAKE_SOURCE_DIR}/${L_FOLDER} ${root}/${L_FOLDER} SYMBOLIC)
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${L_FOLDER}/*.cpp ${L_FOLDER}/cpu/*.cpp ${L_FOLDER}/sinks/*.cpp
       ${L_FOLDER}/pipeline/*.cpp ${L_FOLDER}/dispatch/*.cpp)
  file(GLOB absent CONFIGURE_DEPENDS ${L_FOLDER}/*_absent.cpp)
  set(uses_cuda OFF)
  foreach(library CUDA NCCL)
    if(NOT ${library}_OR_ABSENT IN_LIST L_LIBS)
      continue()
    endif()
    list(REMOVE_ITEM L_LIBS ${library}_OR_ABSENT)
    if(MOESAIC_WITH_${library})
      set(uses_cuda ON)
      file(GLOB cuda_sources CONFIGURE_DEPENDS ${L_FOLDER}/cuda/*.cu ${L_FOLDER}/cuda/*.cpp)
      list(APPEND sources ${cuda_sources})
      if(absent)
        list(REMOVE_ITEM sources ${absent})
      endif()
      if(library STREQUAL "NCCL")
        list(APPEND L_LIBS NCCL::NCCL)
      endif()
    endif()
  endforeach()
  if(UNICODE_OR_ABSENT IN_LIST L_LIBS)
    list(REMOVE_ITEM L_LIBS UNICODE_OR_ABSENT)
    if(MOESAIC_WITH_UNICODE)
      file(GLOB unicode_sources CONFIGURE_DEPENDS ${L_FOLDER}/unicode/*.cpp)
      list(REMOVE_ITEM sources ${absent})
      list(APPEND sources ${unicode_sources})
      list(APPEND L_LIBS unicode_libraries)
    endif()
  endif()
  if(sources)
    add_library(${name} STATIC ${sources})
    set(kind PUBLIC)
    target_link_libraries(${name} PRIVATE ${L_LIBS} moesaic_flags)
    if(uses_cuda)
      target_link_libraries(${name} PRIVATE CUDA::cudart_static CUDA::cublasLt moesaic_cuda_flags)
    endif()
  else()
    add_library(${name} INTERFACE)
    set(kind INTERFACE)
  endif()
  target_include_directories(${name} ${kind} ${root})
  target_link_libraries(${name} ${kind} ${L_USES})
endfunction()

add_library(moesaic_flags INTERFACE)
target_compile_options(moesaic_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-missing-field-initializers -Wno-restrict -Wpedantic -Wshadow -Wnon-virtual-dtor -O3 -march=${MOESAIC_MARCH}
  -fno-math-errno -fno-trapping-math -fopenmp-simd>)
# GCC 13 leaves multiply-add chains unfused for some processors, by the number of sums in flight; all of them are fused here.
target_compile_options(moesaic_flags INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:--param=avoid-fma-max-bits=0>)
